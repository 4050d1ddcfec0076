"""A plan from lengths and two numbers, for those who have no table of samples and no cost file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynapar.cluster import Cluster
from dynapar.costs import (
    AttentionCosts,
    Costs,
    ExchangeCosts,
    FixedCosts,
    LinearCosts,
    ShardedCosts,
    load_costs,
)
from dynapar.errors import CostsError, SampleError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan, Sync
from dynapar.planner import PlannerConfig, plan_step
from dynapar.rings import Degrees, Windows


def model_costs(*, hidden: int, layers: int) -> Costs:
    """Costs of a dense transformer, from its width and depth.

    It has 12 * hidden^2 parameters a layer, as verl and Megatron count them. Rates, latency and
    the share of keys and values are the shipped reference's, so absolute times are not to be
    trusted; what the plan depends on is their ratio.

    Args:
        hidden: Width of the residual stream, and of all query heads together.
        layers: Layers.

    Raises:
        CostsError: One of them is below 1.
    """
    for name, value in (("hidden", hidden), ("layers", layers)):
        if value < 1:
            raise CostsError(f"{name} is {value}; expected 1 or more")
    known = load_costs(None)
    kv_bytes = known.exchange.kv_bytes_per_token * hidden / known.attention.hidden
    return replace(
        known,
        name=f"{known.name} at {layers} x {hidden}",
        linear=replace(known.linear, parameters=12.0 * hidden * hidden * layers),
        attention=replace(known.attention, layers=layers, hidden=hidden),
        exchange=replace(known.exchange, layers=layers, kv_bytes_per_token=kv_bytes),
        sharded=ShardedCosts(),
    )


def timed_costs(
    *, seconds_per_token: float, seconds_per_square: float, seconds_per_microbatch: float = 0.0
) -> Costs:
    """Costs of a model whose forward and backward were timed: a * s + b * s^2 for s tokens.

    Exchange is taken to be hidden behind attention.

    Args:
        seconds_per_token: The a, on one rank.
        seconds_per_square: The b, on one rank.
        seconds_per_microbatch: What a microbatch takes beside its samples.

    Raises:
        CostsError: One of them is negative or not finite, or the first is 0.
    """
    if not 0 < seconds_per_token < float("inf"):
        raise CostsError(
            f"seconds_per_token is {seconds_per_token}; expected a finite number above 0"
        )
    for name, value in (
        ("seconds_per_square", seconds_per_square),
        ("seconds_per_microbatch", seconds_per_microbatch),
    ):
        if not 0 <= value < float("inf"):
            raise CostsError(f"{name} is {value}; expected a finite number, 0 or more")
    # `coefficients` takes 6 * parameters / flops and 7 * layers * hidden / flops a token and pair.
    attention = AttentionCosts()
    if seconds_per_square > 0:
        attention = AttentionCosts(layers=1, hidden=1, flops=7.0 / seconds_per_square)
    return Costs(
        name=f"timed at {seconds_per_token:g} + {seconds_per_square:g} s",
        measured=True,
        linear=LinearCosts(parameters=1.0, flops=6.0 / seconds_per_token),
        attention=attention,
        exchange=ExchangeCosts(),
        fixed=FixedCosts(microbatch=seconds_per_microbatch),
    )


def table_of_lengths(lengths: Sequence[int]) -> SampleTable:
    """Text samples of these lengths; the id of each is its index.

    Args:
        lengths: Tokens of each sample, whole numbers, 1 or more.

    Raises:
        SampleError: One of them is not; it is named.
    """
    for row, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise SampleError(
                f"lengths[{row}] is {length!r}; expected the tokens of a sample, a whole number, "
                f"1 or more: leave empty samples out"
            )
    tokens = np.array(lengths, np.int64)
    none = np.zeros(len(tokens), np.int64)
    return SampleTable(
        ids=tuple(map(str, range(len(tokens)))),
        llm_tokens=tokens,
        text_tokens=tokens,
        label_tokens=tokens - 1,
        modalities=none.astype(np.uint8),
        unit_offsets=np.zeros(len(tokens) + 1, np.int64),
        unit_tokens=np.zeros(0, np.int64),
    )


def plan_lengths(
    lengths: Sequence[int],
    *,
    cluster: str | Cluster,
    capacity: int,
    costs: Costs | None = None,
    step: int = 0,
    sync: Sync = "step",
    degrees: Degrees = "any",
    windows: Windows = "any",
    equal_counts: bool = False,
    peer_budget: int | None = 64,
    max_degree: int | None = None,
) -> StepPlan:
    """Plan one step of text samples of which only the lengths are known.

    Args:
        lengths: Tokens of each sample of the global batch.
        cluster: The ranks, as "8x8" (nodes x ranks of each).
        capacity: Tokens that one rank may hold in one microbatch.
        costs: What work costs, as `model_costs` or `timed_costs` make it of two numbers; None for
            the shipped reference, a 7B model.
        step: Number of the step.
        sync: As `PlannerConfig.sync`; so are the others.
        degrees: Degrees that samples may have.
        windows: Where a ring may start.
        equal_counts: Whether every rank runs equally many microbatches.
        peer_budget: Distinct other ranks that a rank may meet.
        max_degree: Ranks of the largest ring.

    Returns:
        The plan; row i of `plan.samples` is `lengths[i]`.

    Raises:
        SampleError: A length is not a whole number, 1 or more.
        EmptyStepError: There are no lengths.
        PlanError: The samples cannot be placed; the message says what would help.
    """
    samples = table_of_lengths(lengths)
    return plan_step(
        samples,
        step=step,
        cluster=Cluster.parse(cluster) if isinstance(cluster, str) else cluster,
        costs=load_costs(None) if costs is None else costs,
        config=PlannerConfig(
            capacity=capacity,
            encoder_capacity=1,
            sync=sync,
            degrees=degrees,
            windows=windows,
            equal_counts=equal_counts,
            peer_budget=peer_budget,
            max_degree=max_degree,
        ),
    )
