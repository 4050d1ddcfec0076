"""Plan the attention of a microbatch: what each position computes, fetches and sends.

An `AttentionPlan` is made from lengths and masks alone, alike on every rank and without
communication, one for each mask class, and serves all layers of that class. Bound to the ranks of a
ring it becomes a `BoundPlan`, which is what `attend` takes. Sizes of messages follow from the plan
at both ends, so none are exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .bands import Bands, IntArray, check_bands
from .calls import AttentionError, Call, Kernel
from .exchange import Exchange
from .merge import Rows
from .select import select
from .shards import Layout, Spans, cut, index
from .tiles import Tile, TileTable, cut_tiles, fuse, needed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionPlan:
    """What one position does with each source, itself included."""

    tokens: int
    """Rows of its shard."""
    tiles: tuple[tuple[Tile, ...], ...]
    """For each source, the tiles to compute; keys count among the rows fetched from it."""
    fetch: tuple[int, ...]
    """For each source, the key rows to fetch; 0 for the position itself."""
    send: tuple[Rows, ...]
    """For each position, the rows of this shard that it fetches."""
    send_rows: tuple[int, ...]
    """How many these are."""
    _calls: dict[tuple[str, torch.device], tuple[tuple[Call, ...], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _send: dict[torch.device, tuple[Rows, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def calls(
        self, kernel: Kernel, device: torch.device, order: Sequence[int]
    ) -> tuple[tuple[Call, ...], ...]:
        """For each source, the launches of `kernel`; arranged once and kept.

        Args:
            kernel: Arranges tiles in launches.
            device: Of the index tensors.
            order: The sources in the order in which they are computed, this position first.
        """
        key = (kernel.name, device)
        if key not in self._calls:
            arranged: list[tuple[Call, ...]] = [()] * len(self.tiles)
            touched = np.zeros(self.tokens, dtype=bool)
            for source in order:
                calls = []
                for call in kernel.calls(self.tiles[source]):
                    rows = call.q_rows if isinstance(call.q_rows, slice) else call.q_rows.numpy()
                    first = not touched[rows].any()
                    touched[rows] = True
                    calls.append((replace(call, first=True) if first else call).to(device))
                arranged[source] = tuple(calls)
            self._calls[key] = tuple(arranged)
        return self._calls[key]

    def send_on(self, device: torch.device) -> tuple[Rows, ...]:
        """`send` with its index tensors on a device; moved once and kept."""
        if device not in self._send:
            moved = (x if isinstance(x, slice) else x.to(device) for x in self.send)
            self._send[device] = tuple(moved)
        return self._send[device]


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
    """Visible (query, key) pairs that each position computes."""
    spans: Spans
    """The shards."""
    table: TileTable
    """The tiles of all positions."""
    _positions: dict[int, PositionPlan] = field(default_factory=dict, repr=False)

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
        if position not in self._positions:
            self._positions[position] = _prepare(self, position)
        return self._positions[position]

    def fetched(self, position: int) -> int:
        """Key rows that a position fetches from others in a layer's forward."""
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
            stages: Exchanges to spread the other positions over; None is one for each.
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
        scheme = select(self.degree, stages=stages)
        position = list(ranks).index(transport.rank)
        return BoundPlan(
            plan=self,
            position=position,
            ranks=tuple(ranks),
            transport=transport,
            stages=scheme.stages,
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
    stages: tuple[tuple[int, ...], ...]
    """Rounds of each exchange: in round t, position p fetches from position p - t (mod degree)."""
    kernel: str
    """Name of the kernel, or "auto"."""
    local: PositionPlan
    """What this position does."""
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
        return self.local.tokens

    def source(self, round_: int) -> int:
        """The position that this one fetches from in a round."""
        return (self.position - round_) % self.degree

    def user(self, round_: int) -> int:
        """The position that fetches from this one in a round."""
        return (self.position + round_) % self.degree

    def calls(self, kernel: Kernel, device: torch.device) -> tuple[tuple[Call, ...], ...]:
        """For each source, the launches of `kernel`."""
        order = [self.source(t) for t in range(self.degree)]
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

    Raises:
        ValueError: Something is impossible, or the bands of a sequence overlap or leave it.
    """
    if len(bands) != len(lengths):
        raise ValueError(
            f"bands has {len(bands)} masks for {len(lengths)} sequences; expected one for each: "
            "use causal(length) or full(length)"
        )
    if spans is None:
        spans = cut(lengths, degree=degree, positions=positions, layout=layout)
    for i, (length, mask) in enumerate(zip(lengths, bands, strict=True)):
        if len(mask) == 1 and mask[0][:4] == (0, length, 0, length):
            continue
        try:
            check_bands(length, mask)
        except ValueError as error:
            raise ValueError(f"bands[{i}]: {error}") from None
    table = cut_tiles(spans, bands, degree)
    work = np.zeros(degree, dtype=np.int64)
    np.add.at(work, table.position, table.work)
    return AttentionPlan(
        lengths=tuple(lengths),
        degree=degree,
        tokens=tuple(spans.tokens.tolist()),
        work=tuple(work.tolist()),
        spans=spans,
        table=table,
    )


def _prepare(plan: AttentionPlan, position: int) -> PositionPlan:
    table = plan.table
    tiles: list[tuple[Tile, ...]] = []
    fetch: list[int] = []
    send: list[Rows] = []
    for other in range(plan.degree):
        mine = table.tiles[(table.position == position) & (table.source == other)]
        if other == position:
            fetch.append(0)
            send.append(slice(0, 0))
        else:
            needed = needed_rows(mine, plan.tokens[other])
            # A tile needs all rows of its span, so the span stays contiguous once fetched.
            fetched = np.cumsum(needed) - 1
            mine[:, 2] = fetched[mine[:, 2]]
            fetch.append(int(needed.sum()))
            theirs = table.tiles[(table.position == other) & (table.source == position)]
            send.append(_rows(needed_rows(theirs, plan.tokens[position])))
        tiles.append(tuple(fuse(Tile(*row) for row in mine.tolist())))
    return PositionPlan(
        tokens=plan.tokens[position],
        tiles=tuple(tiles),
        fetch=tuple(fetch),
        send=tuple(send),
        send_rows=tuple(x.stop - x.start if isinstance(x, slice) else len(x) for x in send),
    )


def _rows(needed: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Rows:
    """The marked rows, as a slice where they touch."""
    rows: Tensor = torch.from_numpy(np.flatnonzero(needed))
    if len(rows) == 0:
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows
