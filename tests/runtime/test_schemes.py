"""However a ring shares attention, the gradient of a step is that of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from dynapar.attention.exchange import Transport
from dynapar.attention.pooled import RingTransport, make_pool
from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.data.samples import LoadedSample
from dynapar.rings import RingRules, windows
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import Widening, count_targets, reference_step
from dynapar.schemes import SchemeRules, Schemes
from dynapar.shapes import TextShape
from tests.distributed import TIMEOUT, run_ranks
from tests.models import gradients, worst_error
from tests.plans import Written, hand_plan
from tests.runtime import masked_models
from tests.runtime.masked_models import MODELS, make_sample, make_samples
from tests.runtime.test_mask_gradients import keep_attention, tree_and_branches

STEP: list[Written] = [
    ([0, 1, 2, 3], {0: [0, 1, 2, 3], 1: [3, 0], 2: [2]}),
    ([3, 1, 2], {5: [1, 2, 3], 6: [2]}),
    ([1, 0], {4: [0, 1]}),
    ([2, 3], {3: [3, 2]}),
    ([1], {7: [1]}),
]
"""Degrees 1 to 4, ranks in any order, samples on some ranks of a ring, a ring with one token."""

TEXT = TextShape(
    layers=4,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    mlp_width=48,
    vocabulary=120,
    tied=False,
)

SCHEMES = {
    "staged": Schemes(),
    "staged at once": Schemes(rules=SchemeRules(scheme="staged", stages=1)),
    "ulysses": Schemes(rules=SchemeRules(scheme="ulysses")),
    "hybrid 2x2": Schemes(rules=SchemeRules(scheme="hybrid", share=2)),
    "larger groups than rings": Schemes(rules=SchemeRules(scheme="hybrid", share=8)),
    "auto": Schemes(text=TEXT, costs=load_costs("harder"), ranks_per_node=2),
}
EXPECTED = {
    "staged": ["staged"] * 4 + ["local"],
    "staged at once": ["staged"] * 4 + ["local"],
    "ulysses": ["ulysses"] * 4 + ["local"],
    "hybrid 2x2": ["hybrid 2x2", "staged", "ulysses", "ulysses", "local"],
    "larger groups than rings": ["ulysses", "staged", "ulysses", "ulysses", "local"],
}


def samples_of(kind: str) -> list[LoadedSample]:
    """Those of the model, whose fourth has one token, and some more."""
    more = [make_sample(number, [parts]) for number, parts in ((5, 37), (6, 5), (7, 19))]
    return [*make_samples(kind), *more]


def heads_of(q_heads: int, kv_heads: int) -> AbstractContextManager[object]:
    """Models with as many heads."""
    heads = {"num_attention_heads": q_heads, "num_key_value_heads": kv_heads}
    # Llama's configuration wants a multiple of the heads.
    text = {**masked_models.TEXT, **heads, "hidden_size": 8 * q_heads}
    return patch.object(masked_models, "TEXT", text)


def planned(
    model: PreTrainedModel,
    samples: Sequence[LoadedSample],
    step: list[Written],
    transport: RingTransport,
    log: OrderLog,
    schemes: Schemes,
) -> tuple[dict[str, Tensor], list[tuple[tuple[int, ...], str]]]:
    """Gradients of a step on all ranks, and the scheme of this rank's microbatches."""
    executor = StepExecutor(
        Adapter(model), transport=transport, log=log, loss_chunk=16, schemes=schemes
    )
    plan = hand_plan(samples, dist.get_world_size(), step)
    queue = executor.prepare(plan, dict(enumerate(samples)))
    executor.run(queue, targets=count_targets(samples))
    return gradients(model), [(shard.ranks, shard.scheme) for shard in queue]


def wanted(model: PreTrainedModel, samples: Sequence[LoadedSample]) -> dict[str, Tensor]:
    reference_step(model, samples, targets=count_targets(samples))
    return gradients(model)


def base_transport(log: OrderLog) -> RingTransport:
    return Transport(dist.new_group(timeout=TIMEOUT), recorder=log)


def pool_transport(log: OrderLog) -> RingTransport:
    found = windows(Cluster(nodes=1, ranks_per_node=4), RingRules())
    pool = make_pool(found, recorder=log, timeout=TIMEOUT)
    pool.warm_up()
    return pool


def check_kinds(
    rank: int,
    kinds: Sequence[str],
    names: Sequence[str],
    heads: tuple[int, int],
    pooled: bool,
) -> OrderLog:
    log = OrderLog(rank)
    transport = (pool_transport if pooled else base_transport)(log)
    turn = 0
    with heads_of(*heads):
        for kind in kinds:
            samples = samples_of(kind)
            for name in names:
                model = masked_models.make_model(kind)
                got, ran = planned(model, samples, STEP, transport, log, SCHEMES[name])
                if name in EXPECTED:
                    of_ring = {
                        tuple(ring): what
                        for (ring, _), what in zip(STEP, EXPECTED[name], strict=True)
                    }
                    assert ran == [(ring, of_ring[ring]) for ring, _ in ran], (kind, name)
                turn += 1
                if turn % 4 == rank:  # each rank compares some of them
                    error = worst_error(got, wanted(masked_models.make_model(kind), samples))
                    assert error[0] < 1e-5, (kind, name, error)
    messages = [each for each in log.operations if each.sends or each.receives]
    if pooled:
        # Of a ring on the group of its own window, whichever of its ranks they are between.
        rings = [ring for ring, _ in STEP if rank in ring and len(ring) > 1]
        own = {f"exchange {min(ring)}-{max(ring)}" for ring in rings}
        assert {each.communicator for each in messages} <= own
        assert "exchange 0-3" in {each.communicator for each in messages}
    else:
        assert {each.communicator for each in messages} == {"exchange"}
    return log


KINDS = [kind for kind in MODELS if kind not in ("qwen3", "mixtral", "gemma3_text")]


@pytest.mark.parametrize("name", ["ulysses", "hybrid 2x2", "auto"])
def test_every_mask_under_every_scheme(name: str, tmp_path: Path) -> None:
    """Windows, chunks, images that see both ways, sinks and softcaps; 4 heads of 2 on 4 ranks."""
    run_ranks(check_kinds, 4, tmp_path, KINDS, [name], (4, 2), False)


@pytest.mark.parametrize("heads", [(6, 3), (3, 1), (5, 5)], ids=str)
def test_heads_that_do_not_divide(heads: tuple[int, int], tmp_path: Path) -> None:
    """Uneven, and fewer than ranks: one of them then computes no attention."""
    run_ranks(check_kinds, 4, tmp_path, ["llama", "gpt_oss"], list(SCHEMES), heads, False)


def test_rings_on_groups_of_their_own(tmp_path: Path) -> None:
    run_ranks(check_kinds, 4, tmp_path, ["gemma3", "gpt_oss"], list(SCHEMES), (4, 2), True)


def check_exactly(rank: int) -> OrderLog:
    """In float64, where nothing hides in rounding."""
    log = OrderLog(rank)
    transport = base_transport(log)
    samples = samples_of("gemma2")
    for number, (name, schemes) in enumerate(SCHEMES.items()):
        model, reference = (masked_models.make_model("gemma2").double() for _ in range(2))
        with Widening():
            got, _ = planned(model, samples, STEP, transport, log, schemes)
            if number % 4 == rank:
                error = worst_error(got, wanted(reference, samples))
                assert error[0] < 1e-12, (name, error)
    return log


def test_the_gradient_is_exact_in_float64(tmp_path: Path) -> None:
    run_ranks(check_exactly, 4, tmp_path)


def check_trees(rank: int) -> OrderLog:
    log = OrderLog(rank)
    transport = base_transport(log)
    tree, branches = tree_and_branches()
    other = make_sample(3, [29])
    step: list[Written] = [([2, 0, 1, 3], {0: [2, 0, 1, 3], 1: [0, 2]})]
    number = 0
    for kind in ("llama", "mistral", "gpt_oss"):
        for name in ("ulysses", "hybrid 2x2", "auto"):
            model, schemes = masked_models.make_model(kind), SCHEMES[name]
            got, _ = planned(model, [tree, other], step, transport, log, schemes)
            number += 1
            if number % 4 == rank:
                reference = masked_models.make_model(kind)
                error = worst_error(got, wanted(reference, [*branches, other]))
                assert error[0] < 1e-5, (kind, name, error)
    return log


def test_a_tree_has_the_gradient_of_its_branches(tmp_path: Path) -> None:
    run_ranks(check_trees, 4, tmp_path)


def check_recomputation(rank: int) -> OrderLog:
    """Bit for bit the same, with the trades of each layer made again, or attention kept."""
    log = OrderLog(rank)
    transport = base_transport(log)
    for kind, name in (("gemma3", "ulysses"), ("gpt_oss", "hybrid 2x2"), ("llama", "auto")):
        samples, found, counts = samples_of(kind), [], []
        selective = partial(create_selective_checkpoint_contexts, keep_attention)
        for how in (None, {}, {"context_fn": selective}):
            model = masked_models.make_model(kind)
            if how is not None:
                model.gradient_checkpointing_enable({"use_reentrant": False, **how})
            before = len(log.operations)
            got, _ = planned(model, samples, STEP, transport, log, SCHEMES[name])
            found.append(got)
            counts.append(Counter(op.operation for op in log.operations[before:]))
        once, twice, kept = counts
        for operation in ("attention forward trade", "attention forward rows"):
            assert twice[operation] == 2 * once[operation], (kind, operation)
            assert kept[operation] == once[operation], (kind, operation)
        assert once["attention forward trade"] > 0
        for other in found[1:]:
            assert all(torch.equal(other[key], found[0][key]) for key in other), kind
    return log


def test_recomputed_layers_give_the_very_same_gradients(tmp_path: Path) -> None:
    run_ranks(check_recomputation, 4, tmp_path)
