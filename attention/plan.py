"""Plan the attention of a microbatch: what each position computes, fetches and sends.

An `AttentionPlan` is made from lengths and masks alone, alike on every rank and without
communication, one for each mask class, and serves all layers of that class. Bound to the ranks of a
ring it becomes a `BoundPlan`, which is what `attend` takes. Sizes of messages follow from the plan
at both ends, so none are exchanged.

Under a scheme that shares heads, positions stand in groups (`select`): runs of positions that hold
their rows together, so that tiles, sources and exchanges are those of groups. Otherwise each
position is a group of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import torch

from .bands import Bands, IntArray, check_bands
from .calls import AttentionError, Call, Kernel
from .exchange import Exchange
from .positions import PositionPlan, member_rows, prepare
from .select import Scheme, select
from .shards import Layout, Spans, cut, index, spans_of
from .tiles import TileTable, cut_tiles


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPlan:
    """Who holds and who computes what of a packed microbatch, for one mask class."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, in pack order."""
    degree: int
    """Positions of the ring."""
    tokens: tuple[int, ...]
    """Rows of each position's shard."""
    work: tuple[int, ...]
    """Visible (query, key) pairs that each position computes, counting a pair by the share of heads
    for which it is computed there."""
    scheme: Scheme
    """How the ring shares attention."""
    spans: Spans
    """The shard of each position."""
    held: Spans
    """The rows of each group."""
    table: TileTable
    """The tiles of all groups."""
    _groups: dict[int, PositionPlan] = field(default_factory=dict, repr=False)

    def index(self, position: int) -> IntArray:
        """Where a position's rows lie in the packed microbatch: its shard is `packed[index]`.

        Args:
            position: 0 to degree - 1.

        Returns:
            (tokens[position],) int64, positions in the concatenation of the sequences.
        """
        return index(self.spans, self.lengths, position)

    def prepare(self, position: int) -> PositionPlan:
        """What one position computes, fetches and sends; worked out once and kept.

        `bind` calls it. A loader that knows the position calls it ahead of time.

        Args:
            position: 0 to degree - 1.
        """
        group, share = position // self.scheme.share, self.scheme.share
        if group not in self._groups:
            members = member_rows(self.spans, self.held, self.lengths, share=share, group=group)
            self._groups[group] = prepare(self.table, self.held, members, group)
        return self._groups[group]

    def fetched(self, position: int) -> int:
        """Key rows that a position fetches from other groups in a layer's forward."""
        return sum(self.prepare(position).fetch)

    def bind(
        self,
        *,
        ranks: Sequence[int],
        transport: Exchange,
        stages: int | None = None,
        kernel: str = "auto",
    ) -> BoundPlan:
        """Give each position a rank. All ranks of the ring bind alike.

        Args:
            ranks: The transport's rank at each position.
            transport: Carries the ring's messages.
            stages: Exchanges to spread the other groups over; None is as the scheme has it.
            kernel: A name of `kernels.KERNELS`, or "auto".

        Raises:
            ValueError: `ranks` are not one different rank for each position, this rank among them.
        """
        if len(ranks) != self.degree or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"ranks {list(ranks)} were bound to a plan of degree {self.degree}; expected "
                f"{self.degree} different ranks: plan the microbatch for the ring that runs it"
            )
        if transport.rank not in ranks:
            raise ValueError(
                f"rank {transport.rank} binds a plan of ranks {list(ranks)}; expected to be one of "
                "them: only the ranks of a microbatch run it"
            )
        scheme = self.scheme if stages is None else self.scheme.in_stages(stages)
        position = list(ranks).index(transport.rank)
        return BoundPlan(
            plan=self,
            position=position,
            ranks=tuple(ranks),
            transport=transport,
            scheme=scheme,
            kernel=kernel,
            local=self.prepare(position),
        )


_handles = itertools.count(1)
_live: WeakValueDictionary[int, BoundPlan] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class BoundPlan:
    """A plan on the ranks of a ring, as one of them sees it."""

    plan: AttentionPlan
    position: int
    """Of this rank."""
    ranks: tuple[int, ...]
    """The transport's rank at each position."""
    transport: Exchange
    scheme: Scheme
    kernel: str
    """Name of the kernel, or "auto"."""
    local: PositionPlan
    """What this position's group does."""
    handle: int = field(default_factory=lambda: next(_handles))
    """Stands for the plan in operators, which take no objects; not used again in this process."""

    def __post_init__(self) -> None:
        _live[self.handle] = self

    @property
    def degree(self) -> int:
        """Positions of the ring."""
        return self.plan.degree

    @property
    def tokens(self) -> int:
        """Rows of this rank's shard."""
        return self.plan.tokens[self.position]

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Rounds of each exchange between groups."""
        return self.scheme.stages

    @property
    def group(self) -> int:
        """The number of this position's group."""
        return self.position // self.scheme.share

    @property
    def member(self) -> int:
        """Which member of its group this position is, 0 to share - 1."""
        return self.position % self.scheme.share

    @property
    def members(self) -> tuple[int, ...]:
        """The transport's rank of each member of this group."""
        first = self.position - self.member
        return self.ranks[first : first + self.scheme.share]

    def counterpart(self, group: int) -> int:
        """The transport's rank of the member of a group that computes the same heads as this."""
        return self.ranks[group * self.scheme.share + self.member]

    def source(self, round_: int) -> int:
        """The group that this one fetches from in a round."""
        return (self.group - round_) % self.scheme.groups

    def user(self, round_: int) -> int:
        """The group that fetches from this one in a round."""
        return (self.group + round_) % self.scheme.groups

    def calls(self, kernel: Kernel, device: torch.device) -> tuple[tuple[Call, ...], ...]:
        """For each source, the launches of `kernel`."""
        order = [self.source(t) for t in range(self.scheme.groups)]
        return self.local.calls(kernel, device, order)


def live_plan(handle: int) -> BoundPlan:
    """The bound plan behind a handle.

    Raises:
        AttentionError: It has been let go.
    """
    plan = _live.get(handle)
    if plan is None:
        raise AttentionError(
            f"attention plan {handle} is gone; expected it to live until the backward pass is "
            "done: keep a reference to the BoundPlan as long as its microbatch"
        )
    return plan


def live_plans() -> int:
    """How many bound plans are alive in this process."""
    return len(_live)


def plan_attention(
    lengths: Sequence[int],
    *,
    degree: int,
    bands: Sequence[Bands],
    positions: Sequence[Sequence[int]] | None = None,
    layout: Layout = "zigzag",
    spans: Spans | None = None,
    scheme: Scheme | str = "auto",
) -> AttentionPlan:
    """Cut a packed microbatch over the positions of a ring, and its masks into tiles.

    Pure: equal arguments give equal plans on every rank. Cheap enough for the loader's thread:
    vectorised over sequences.

    Args:
        lengths: Tokens of each sequence, 1 or more, in pack order.
        degree: Positions of the ring; 1 is a rank alone.
        bands: The mask of each sequence, by a constructor of `bands` such as `causal(length)`.
        positions: For each sequence, the positions (of 0 to degree - 1) that share it, in order;
            None is all of them. Others hold none of its tokens.
        layout: How chunks go to the positions that share a sequence.
        spans: These very shards, instead of a cut by `positions` and `layout`: those of
            `evenly.cut_evenly`, which all mask classes of a model share.
        scheme: How the ring shares attention: what `select` gave, or a name for it to look up.

    Raises:
        ValueError: Something is impossible, or the bands of a sequence overlap or leave it.
    """
    _check_masks(lengths, bands)
    if spans is None:
        spans = cut(lengths, degree=degree, positions=positions, layout=layout)
    chosen = select(degree, name=scheme) if isinstance(scheme, str) else scheme
    if chosen.degree != degree:
        raise ValueError(
            f"{chosen} is for degree {chosen.degree}; expected one for {degree}, the plan's: "
            "select the scheme by the microbatch's degree"
        )
    share, groups = chosen.share, chosen.groups
    held = spans if share == 1 else _grouped(spans, share=share, groups=groups)
    table = cut_tiles(held, bands, groups)
    work = np.zeros(groups, dtype=np.int64)
    np.add.at(work, table.position, table.work)
    return AttentionPlan(
        lengths=tuple(lengths),
        degree=degree,
        tokens=tuple(spans.tokens.tolist()),
        work=tuple(np.repeat(work // share, share).tolist()),
        scheme=chosen,
        spans=spans,
        held=held,
        table=table,
    )


def _check_masks(lengths: Sequence[int], bands: Sequence[Bands]) -> None:
    if len(bands) != len(lengths):
        raise ValueError(
            f"bands has {len(bands)} masks for {len(lengths)} sequences; expected one for each: "
            "use causal(length) or full(length)"
        )
    for i, (length, mask) in enumerate(zip(lengths, bands, strict=True)):
        if len(mask) == 1 and mask[0][:4] == (0, length, 0, length):
            continue
        try:
            check_bands(length, mask)
        except ValueError as error:
            raise ValueError(f"bands[{i}]: {error}") from None


def _grouped(spans: Spans, *, share: int, groups: int) -> Spans:
    """The rows that the members of each group hold together, in pack order."""
    table = np.stack([spans.position // share, spans.sequence, spans.start, spans.stop])
    return spans_of(table, groups)
