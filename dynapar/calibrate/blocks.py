"""Choose the microbatches that are timed, so that each term of the costs shows in some of them.

Text of chosen lengths tells linear from attention: as many tokens in one segment, in few, in many;
and tokens from targets: all of them have one, or few.
Samples of the index bring encoder units of the sizes that the run will meet. Rings of two show what
sharing costs. Packs of whole samples are kept out of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynapar.memory.policies import Policy
from dynapar.meta import SampleTable

Kind = Literal["text", "encoder", "ring", "again", "packs"]
"""Text on one rank; samples with media on one rank; text on a ring of two; text whose activations
are computed again; packs of whole samples, which the fit does not see."""

LEAST_SEGMENT = 16
SINGLES, PACKS = 10, 10
FEW_TARGETS = 0.2
"""Share of tokens with targets, as where much is asked and little answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A microbatch to be timed: text of these lengths, or these rows of the index."""

    kind: Kind
    lengths: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    degree: int = 1
    share: float = 1.0
    """Of the text's tokens that have targets."""
    recompute: Policy = "none"

    def tokens(self, table: SampleTable) -> tuple[int, ...]:
        """LLM tokens of its samples."""
        return self.lengths or tuple(int(table.llm_tokens[row]) for row in self.rows)

    def targets(self, table: SampleTable) -> tuple[int, ...]:
        """Targets of its samples."""
        if self.rows:
            return tuple(int(table.label_tokens[row]) for row in self.rows)
        return tuple(min(round(length * self.share), length - 1) for length in self.lengths)

    def units(self, table: SampleTable) -> tuple[int, ...]:
        """Encoder tokens of its encoder units, all on its first rank."""
        return tuple(int(unit) for row in self.rows for unit in table.units(row))


def choose_blocks(
    table: SampleTable, *, capacity: int, encoder_capacity: int, ranks: int
) -> tuple[Block, ...]:
    """All shapes, rings first, so that both of their ranks begin them together.

    Args:
        table: All samples of the index.
        capacity: LLM tokens of a rank.
        encoder_capacity: Encoder tokens of a rank.
        ranks: Of the measurement; rings need two.
    """
    blocks = [*_rings(capacity)] if ranks > 1 else []
    blocks += _texts(capacity)
    half = tuple(_split(max(capacity // 2, LEAST_SEGMENT), 2))
    for policy in ("selective", "full"):
        blocks += [Block(kind="again", lengths=half, recompute=policy)]
        blocks += [Block(kind="again", lengths=(capacity,), recompute=policy)]
    encoder = table.encoder_tokens
    fits = np.flatnonzero((table.llm_tokens <= capacity) & (encoder <= encoder_capacity))
    media = fits[encoder[fits] > 0]
    media = media[np.argsort(encoder[media], kind="stable")]
    if len(media):
        places = np.unique(np.linspace(0, len(media) - 1, SINGLES).astype(np.int64))
        blocks += [Block(kind="encoder", rows=(int(row),)) for row in media[places]]
    blocks += _packs(table, media, capacity, encoder_capacity, count=PACKS // 2, kind="encoder")
    blocks += _packs(table, fits, capacity, encoder_capacity, count=PACKS, kind="packs")
    return tuple(dict.fromkeys(blocks))


def _texts(capacity: int) -> list[Block]:
    found = []
    for row, part in enumerate((16, 8, 4, 2, 1)):
        total = max(capacity // part, LEAST_SEGMENT)
        for column, pieces in enumerate((1, 3, 9, 27)):
            if total // pieces >= LEAST_SEGMENT:
                share = FEW_TARGETS if (row + column) % 2 else 1.0
                lengths = tuple(_split(total, pieces))
                found.append(Block(kind="text", lengths=lengths, share=share))
    return found


def _rings(capacity: int) -> list[Block]:
    return [
        Block(kind="ring", lengths=tuple(_split(max(2 * capacity // part, 32), pieces)), degree=2)
        for part, pieces in ((16, 1), (8, 2), (4, 1), (4, 6), (2, 1), (2, 3), (1, 1), (1, 4))
    ]


def _split(total: int, pieces: int) -> list[int]:
    """Lengths that differ, as those of a pack do: about 1 : 2 : 3 : ..."""
    weights = np.arange(1, pieces + 1) + pieces
    edges = np.concatenate(([0], np.cumsum(weights))) * total // weights.sum()
    return [int(length) for length in np.diff(edges)]


def _packs(
    table: SampleTable,
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    capacity: int,
    encoder_capacity: int,
    *,
    count: int,
    kind: Kind,
) -> list[Block]:
    """Packs of drawn samples, each filled to a third, two thirds, or all of the capacities."""
    blocks: list[Block] = []
    drawn = iter(np.random.default_rng(len(kind)).permutation(np.tile(rows, count)).tolist())
    for number in range(count):
        taken: list[int] = []
        limit = capacity * (number % 3 + 1) // 3
        for row in drawn:
            tokens = int(table.llm_tokens[[*taken, row]].sum())
            encoder = int(table.encoder_tokens[[*taken, row]].sum())
            if taken and (tokens > limit or encoder > encoder_capacity):
                break
            if row not in taken:
                taken.append(row)
        if taken:
            blocks.append(Block(kind=kind, rows=tuple(taken)))
    return blocks
