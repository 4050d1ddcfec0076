"""Check who holds what in a plan: every sample once, rings that may work, memory after the cuts.

Each check yields what it finds wrong, for `validate` to put into its message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dynapar.memory.policies import POLICIES
from dynapar.meta import IntArray
from dynapar.plan.columns import owners, positions
from dynapar.plan.model import StepPlan


def column_problems(plan: StepPlan) -> Iterator[str]:
    """Columns whose lengths do not fit each other; then nothing else can be judged."""
    columns = plan.columns
    count, samples, places = len(columns.ticks), len(columns.sample_rows), len(columns.ranks)
    for name, rows, entries in (
        ("rank_offsets", count, places),
        ("sample_offsets", count, samples),
        ("share_offsets", samples, len(columns.share_ranks)),
        ("unit_offsets", samples, len(columns.unit_ranks)),
        ("queue_offsets", len(columns.queue_offsets) - 1, len(columns.queue)),
    ):
        offsets = getattr(columns, name)
        whole = len(offsets) == rows + 1 and offsets[0] == 0 and offsets[-1] == entries
        if not whole or (np.diff(offsets) < 0).any():
            yield f"columns.{name} does not deal {entries} entries to {rows} rows in order"
    for name, shape in (
        ("tokens", (places,)),
        ("encoder_tokens", (places,)),
        ("starts", (count,)),
        ("parts", (count, 5)),
        ("recompute", (count,)),
        ("waves", (len(columns.waves), 3)),
    ):
        if (found := getattr(columns, name).shape) != shape:
            yield f"columns.{name} has shape {found}; expected {shape}"


def coverage_problems(plan: StepPlan) -> Iterator[str]:
    """Samples that are not in exactly one microbatch."""
    columns, names, count = plan.columns, plan.samples.ids, len(plan.samples)
    rows, owner = columns.sample_rows, owners(columns.sample_offsets)
    for number in np.flatnonzero(np.diff(columns.sample_offsets) == 0):
        yield f"microbatch {number} has no sample"
    known = (rows >= 0) & (rows < count)
    for entry in np.flatnonzero(~known):
        yield f"microbatch {owner[entry]} runs row {rows[entry]} of {count} samples"
    order = np.flatnonzero(known)[np.argsort(rows[known], kind="stable")]
    for entry in np.flatnonzero(np.diff(rows[order]) == 0):
        one, other = order[entry], order[entry + 1]
        yield f"sample {names[rows[one]]!r} is in microbatches {owner[one]} and {owner[other]}"
    for row in np.flatnonzero(np.bincount(rows[known], minlength=count) == 0):
        yield f"sample {names[row]!r} is in no microbatch"


def _ring_problems(plan: StepPlan, offsets: IntArray, ranks: IntArray) -> dict[int, str]:
    """Of rows of ranks that are to work together, those that may not, and why."""
    node, width = plan.ranks_per_node, np.diff(offsets)
    half = node if node % 2 else node // 2
    first = np.full(len(width), -1, np.int64)
    first[width > 0] = ranks[offsets[:-1][width > 0]]
    last = first + width - 1
    gaps = ranks != np.repeat(first, width) + positions(offsets)
    broken = (np.bincount(owners(offsets)[gaps], minlength=len(width)) > 0) | (width == 0)
    outside = (first < 0) | (last >= plan.ranks)
    split = (width <= node) & (first // node != last // node)
    ragged = (width > node) & ((first % half > 0) | (width % half > 0))
    faults = {}
    for row in np.flatnonzero(broken | outside | split | ragged).tolist():
        span = f"ranks {first[row]}..{last[row]}"
        if broken[row]:
            own = ranks[offsets[row] : offsets[row + 1]].tolist()
            faults[row] = f"ranks {own} are not consecutive and ascending"
        elif outside[row]:
            faults[row] = f"{span} are not all among 0..{plan.ranks - 1}"
        elif split[row]:
            faults[row] = f"{span} span nodes of {node}, yet would fit in one"
        else:
            faults[row] = f"{span} are not whole half nodes of {half}"
    return faults


def shape_problems(plan: StepPlan) -> Iterator[str]:
    """Ranks that may not work together, and samples outside their microbatch."""
    columns, names = plan.columns, plan.samples.ids
    rings = _ring_problems(plan, columns.rank_offsets, columns.ranks)
    yield from (f"microbatch {number}: {what}" for number, what in rings.items())
    # What is inside a microbatch is judged where its own ranks and rows are sound.
    owner, rows = owners(columns.sample_offsets), columns.sample_rows
    judged = (rows >= 0) & (rows < len(plan.samples)) & ~np.isin(owner, list(rings))

    def where(entry: int) -> tuple[str, str]:
        return f"microbatch {owner[entry]}", repr(names[rows[entry]])

    foreign = _foreign(plan, columns.share_offsets, columns.share_ranks)
    shares = _ring_problems(plan, columns.share_offsets, columns.share_ranks)
    for entry in sorted(foreign.keys() | shares.keys()):
        if judged[entry]:
            number, name = where(entry)
            if entry in foreign:
                yield f"{number}: sample {name} is on rank {foreign[entry]}, which is not in it"
            else:
                yield f"{number}: sample {name}: {shares[entry]}"
    placed = np.diff(columns.unit_offsets)
    units = np.diff(plan.samples.unit_offsets)[np.where(judged, rows, 0)]
    for entry in np.flatnonzero(judged & (placed != units)).tolist():
        number, name = where(entry)
        yield (
            f"{number}: sample {name} has {units[entry]} encoder units, {placed[entry]} are placed"
        )
    for entry, rank in _foreign(plan, columns.unit_offsets, columns.unit_ranks).items():
        if judged[entry]:
            number, name = where(entry)
            yield (
                f"{number}: an encoder unit of sample {name} is on rank {rank}, which is not in it"
            )


def _foreign(plan: StepPlan, offsets: IntArray, ranks: IntArray) -> dict[int, int]:
    """Of rows of ranks, one a sample, those with a rank outside their microbatch, and the first."""
    columns = plan.columns
    owner = owners(columns.sample_offsets)
    width = np.diff(columns.rank_offsets)
    first = np.zeros(len(width), np.int64)
    first[width > 0] = columns.ranks[columns.rank_offsets[:-1][width > 0]]
    row = owners(offsets)
    place = ranks - first[owner[row]]
    outside = np.flatnonzero((place < 0) | (place >= width[owner[row]]))
    return dict(zip(row[outside][::-1].tolist(), ranks[outside][::-1].tolist(), strict=True))


def _cut(tokens: IntArray, degree: IntArray, position: IntArray) -> IntArray:
    """Tokens on a position of a ring: zigzag chunks j and 2 * degree - 1 - j."""

    def edge(chunk: IntArray) -> IntArray:
        return chunk * tokens // (2 * degree)

    mirror = 2 * degree - 1 - position
    return edge(position + 1) - edge(position) + edge(mirror + 1) - edge(mirror)


def memory_problems(plan: StepPlan) -> Iterator[str]:
    """Ranks that hold other amounts than the plan says, or more than they can."""
    columns, table = plan.columns, plan.samples
    rows, owner = columns.sample_rows, owners(columns.sample_offsets)
    # Where the row of a rank of the sample's microbatch lies, but for the rank itself.
    base = (columns.rank_offsets[:-1] - columns.ranks[columns.rank_offsets[:-1]])[owner]
    share, unit = owners(columns.share_offsets), owners(columns.unit_offsets)
    tokens, encoder = np.zeros((2, len(columns.ranks)), np.int64)
    cut = _cut(
        table.llm_tokens[rows][share], columns.degrees[share], positions(columns.share_offsets)
    )
    np.add.at(tokens, base[share] + columns.share_ranks, cut)
    own = table.unit_offsets[rows][unit] + positions(columns.unit_offsets)
    np.add.at(encoder, base[unit] + columns.unit_ranks, table.unit_tokens[own])
    held = owners(columns.rank_offsets)
    for what, derived, stated, most, key in (
        ("tokens", tokens, columns.tokens, plan.capacity, "capacity"),
        (
            "encoder tokens",
            encoder,
            columns.encoder_tokens,
            plan.encoder_capacity,
            "encoder_capacity",
        ),
    ):
        for number in np.unique(held[derived != stated]):
            span = slice(columns.rank_offsets[number], columns.rank_offsets[number + 1])
            yield (
                f"microbatch {number}: {what} per rank are {derived[span].tolist()}; the plan says "
                f"{stated[span].tolist()}"
            )
        for entry in np.flatnonzero(derived > most):
            yield (
                f"microbatch {held[entry]}: rank {columns.ranks[entry]} holds {derived[entry]:,} "
                f"{what}; {key} is {most:,}"
            )
    yield from _byte_problems(plan, tokens, encoder)


def _byte_problems(plan: StepPlan, tokens: IntArray, encoder: IntArray) -> Iterator[str]:
    """Ranks that need more bytes than the plan's budget has, under their microbatch's policy."""
    columns, memory = plan.columns, plan.memory
    if memory is None:
        return
    allowed = {POLICIES.index(limits.policy): limits for limits in memory.policies}
    held = owners(columns.rank_offsets)
    for number in np.flatnonzero(~np.isin(columns.recompute, list(allowed))).tolist():
        yield (
            f"microbatch {number} has recompute {POLICIES[columns.recompute[number]]!r}; the "
            f"plan's budget knows {', '.join(limits.policy for limits in memory.policies)}"
        )
    for policy, limits in allowed.items():
        rows = np.flatnonzero(columns.recompute[held] == policy)
        peak = limits.peak(tokens[rows], encoder[rows])
        for row, needed in zip(rows[peak > memory.budget], peak[peak > memory.budget], strict=True):
            yield (
                f"microbatch {held[row]}: rank {columns.ranks[row]} needs {needed:,} bytes under "
                f"recompute {limits.policy!r}; the budget is {memory.budget:,}"
            )
