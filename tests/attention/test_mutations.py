"""Faults planted in attention: the comparison with dense attention notices each of them.

Each fault is one that a change could bring, and that leaves shapes, dtypes and the order of
messages as they are, so that nothing but the numbers tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dynapar.attention import merge, staged, ulysses
from dynapar.attention.bands import Bands
from dynapar.attention.kernels_cpu import CpuFlash
from dynapar.attention.plan import AttentionPlan, BoundPlan, plan_attention
from dynapar.attention.select import Scheme, select
from tests.attention.oracle import MASKS
from tests.attention.test_fuzz import computed, errors, problem, wanted

LENGTHS = (53, 7, 30)
SCHEMES = {
    "degree 1": select(1),
    "staged 2": select(2),
    "staged 4": select(4),
    "all rows at once": select(4).in_stages(1),
    "ulysses 3": select(3, name="ulysses"),
    "hybrid 4": select(4, name="hybrid", share=2),
}
LIMIT = {torch.float64: 1e-12, torch.float32: 5e-6}

Bend = Callable[[Bands], Bands]


def same(bands: Bands) -> Bands:
    return bands


def shifted(bands: Bands) -> Bands:
    """The diagonal of the first band off by one: a token does not see itself."""
    return (bands[0]._replace(lo=bands[0].lo + 1), *bands[1:])


def wider(bands: Bands) -> Bands:
    """The window of the first band off by one."""
    return (bands[0]._replace(hi=bands[0].hi + 1), *bands[1:])


def shorter(bands: Bands) -> Bands:
    """The last query of the last band left out."""
    return (*bands[:-1], bands[-1]._replace(q1=bands[-1].q1 - 1))


def worst(
    name: str, scheme: Scheme, bend: Bend = same, dtype: torch.dtype = torch.float64
) -> float:
    """The largest error of output and gradients against dense attention under the right mask."""
    right = [MASKS[name].bands(length) for length in LENGTHS]
    dense = torch.block_diag(*(MASKS[name].dense(length) for length in LENGTHS)).bool()
    plan: AttentionPlan = plan_attention(
        LENGTHS, degree=scheme.degree, bands=[bend(bands) for bands in right], scheme=scheme
    )
    given = problem(dense, (6, 2), 16).to(dtype)
    return max(errors(computed(given, plan, "cpu_flash"), wanted(given)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_without_a_fault_nothing_is_noticed(scheme: str, dtype: torch.dtype) -> None:
    for mask in ("causal", "window", "tree"):
        assert worst(mask, SCHEMES[scheme], dtype=dtype) < LIMIT[dtype]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("mask", "bend"),
    [
        ("causal", shifted),
        ("causal", shorter),
        ("window", wider),
        ("images in a window", wider),
        ("tree", shorter),
    ],
)
def test_a_band_off_by_one(mask: str, bend: Bend, scheme: str) -> None:
    assert worst(mask, SCHEMES[scheme], bend) > 1e-3


Patch = Callable[[pytest.MonkeyPatch], None]


def merge_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    real = merge.merge_

    def low(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        real(out, lse, part.bfloat16(), part_lse)

    patch.setattr(merge, "merge_", low)


def log_sum_exp_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    real = merge.merge_

    def low(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        real(out, lse, part, part_lse.bfloat16().to(lse.dtype))

    patch.setattr(merge, "merge_", low)


def the_last_part_wins(patch: pytest.MonkeyPatch) -> None:
    def replaced(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        out.copy_(part)
        lse.copy_(part_lse)

    patch.setattr(merge, "merge_", replaced)


def last_stage_left_out(patch: pytest.MonkeyPatch) -> None:
    """On all ranks, so that their messages still meet."""
    real = BoundPlan.stages.fget  # type: ignore[attr-defined]
    patch.setattr(BoundPlan, "stages", property(lambda plan: real(plan)[:-1]))


def gradients_sent_but_not_added(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staged, "add_", lambda *_: None)


def gradients_added_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    real = merge.add_

    def low(x: Tensor, rows: object, value: Tensor) -> None:
        real(x, rows, value.bfloat16())  # type: ignore[arg-type]

    patch.setattr(staged, "add_", low)


def own_log_sum_exp_in_backward(patch: pytest.MonkeyPatch) -> None:
    """Each call's own, where that over all keys is due: a factor on its gradients."""
    real = CpuFlash.backward

    def own(self: CpuFlash, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse, call = args
        _, own_lse = self.forward(q, k, v, call, **options)
        lse = lse.clone()
        merge.put_(lse, call.q_rows, own_lse)
        return real(self, grad, q, k, v, out, lse, call, **options)

    patch.setattr(CpuFlash, "backward", own)


def heads_traded_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    real = ulysses._to_rows

    def turned(*args: Any) -> Iterator[tuple[Any, Sequence[Tensor]]]:
        found = list(real(*args))
        first, second = found[0][0], found[1][0]
        yield replace(first, q=second.q), found[0][1]
        yield replace(second, q=first.q), found[1][1]
        yield from found[2:]

    patch.setattr(ulysses, "_to_rows", turned)


FAULTS: dict[str, tuple[Patch, Sequence[str]]] = {
    "a merge in bfloat16": (merge_in_bfloat16, ("staged 2", "staged 4", "hybrid 4")),
    "a log-sum-exp in bfloat16": (log_sum_exp_in_bfloat16, ("staged 2", "hybrid 4")),
    "the last part wins": (the_last_part_wins, ("staged 2", "staged 4", "hybrid 4")),
    "a missing stage": (last_stage_left_out, ("staged 2", "staged 4", "all rows at once")),
    "a missing stage between groups": (last_stage_left_out, ("hybrid 4",)),
    "gradients that are not added": (gradients_sent_but_not_added, ("staged 2", "hybrid 4")),
    "gradients added in bfloat16": (gradients_added_in_bfloat16, ("staged 4", "hybrid 4")),
    "backward with a part's log-sum-exp": (own_log_sum_exp_in_backward, ("staged 2", "hybrid 4")),
    "heads that change places": (heads_traded_in_the_wrong_order, ("ulysses 3", "hybrid 4")),
}
"""By what is wrong: how to plant it, and the schemes that it touches."""


@contextmanager
def planted(fault: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault(name: str) -> None:
    fault, schemes = FAULTS[name]
    for scheme in schemes:
        with planted(fault):
            assert worst("causal", SCHEMES[scheme], dtype=torch.float32) > 5e-6, scheme
