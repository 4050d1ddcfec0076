"""Work out what one position of a ring computes, fetches and sends, from the tiles of all.

Positions stand in groups that share heads and hold their rows together; where a scheme has none, a
group is one position. What is below is the same for all members of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from .bands import IntArray
from .calls import Call, Kernel
from .merge import Rows, count
from .shards import Spans, index
from .tiles import Tile, TileTable, fuse, needed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionPlan:
    """What a position, or the group that it is in, does with each source, itself included."""

    tokens: int
    """Rows that the group holds."""
    members: tuple[Rows, ...]
    """For each member of the group, which of these rows are its shard's, in the shard's order."""
    tiles: tuple[tuple[Tile, ...], ...]
    """For each source, the tiles to compute; keys count among the rows fetched from it."""
    fetch: tuple[int, ...]
    """For each source, the key rows to fetch; 0 for the group itself."""
    send: tuple[Rows, ...]
    """For each group, the rows of this one that it fetches."""
    send_rows: tuple[int, ...]
    """How many these are."""
    _calls: dict[tuple[str, torch.device], tuple[tuple[Call, ...], ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _moved: dict[torch.device, tuple[tuple[Rows, ...], tuple[Rows, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def calls(
        self, kernel: Kernel, device: torch.device, order: Sequence[int]
    ) -> tuple[tuple[Call, ...], ...]:
        """For each source, the launches of `kernel`; arranged once and kept.

        Args:
            kernel: Arranges tiles in launches.
            device: Of the index tensors.
            order: The sources in the order in which they are computed, this one first.
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
        return self._on(device)[0]

    def members_on(self, device: torch.device) -> tuple[Rows, ...]:
        """`members` with its index tensors on a device; moved once and kept."""
        return self._on(device)[1]

    def _on(self, device: torch.device) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
        if device not in self._moved:
            send, members = (
                tuple(x if isinstance(x, slice) else x.to(device) for x in rows)
                for rows in (self.send, self.members)
            )
            self._moved[device] = send, members
        return self._moved[device]


def prepare(table: TileTable, held: Spans, members: tuple[Rows, ...], group: int) -> PositionPlan:
    """What one group does.

    Args:
        table: The tiles of all groups.
        held: The rows of each group.
        members: As in `PositionPlan`.
        group: Its number.
    """
    tokens = held.tokens.tolist()
    tiles: list[tuple[Tile, ...]] = []
    fetch: list[int] = []
    send: list[Rows] = []
    for other in range(len(tokens)):
        mine = table.tiles[(table.position == group) & (table.source == other)]
        if other == group:
            fetch.append(0)
            send.append(slice(0, 0))
        else:
            needed = needed_rows(mine, tokens[other])
            # A tile needs all rows of its span, so the span stays contiguous once fetched.
            fetched = np.cumsum(needed) - 1
            mine[:, 2] = fetched[mine[:, 2]]
            fetch.append(int(needed.sum()))
            theirs = table.tiles[(table.position == other) & (table.source == group)]
            send.append(_rows(np.flatnonzero(needed_rows(theirs, tokens[group]))))
        tiles.append(tuple(fuse(Tile(*row) for row in mine.tolist())))
    return PositionPlan(
        tokens=tokens[group],
        members=members,
        tiles=tuple(tiles),
        fetch=tuple(fetch),
        send=tuple(send),
        send_rows=tuple(map(count, send)),
    )


def member_rows(
    spans: Spans, held: Spans, lengths: Sequence[int], *, share: int, group: int
) -> tuple[Rows, ...]:
    """Where the shards of a group's members lie among the rows that it holds.

    Args:
        spans: The shard of each position.
        held: The rows of each group.
        lengths: Tokens of each sequence.
        share: Members of a group.
        group: Its number.
    """
    if share == 1:
        return (slice(0, int(held.tokens[group])),)
    place = np.empty(sum(lengths), dtype=np.int64)
    rows = index(held, lengths, group)
    place[rows] = np.arange(len(rows))
    positions = range(group * share, (group + 1) * share)
    return tuple(_rows(place[index(spans, lengths, position)]) for position in positions)


def _rows(rows: IntArray) -> Rows:
    """Rows, as a slice where each follows the one before."""
    if len(rows) == 0:
        return slice(0, 0)
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    found: Tensor = torch.from_numpy(rows)
    return found
