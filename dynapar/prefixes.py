"""What samples share: the columns of prefixes, and of the trees that they make.

Samples of one *prefix* begin with the same tokens and media: several questions about one image,
several answers to one prompt. A *tree* is a sample that stands for some of them in a step: the
prefix once, then what is left of each *member*, its branch. A token of a branch sees the prefix and
its own branch, at the positions that it has in its member, so that a tree's gradient is its
members', added up (`dynapar.attention.trees`). P tokens of prefix and branches of b tokens hold

    P * (P + 1) / 2 + sum of (P * b + b * (b + 1) / 2)

pairs that see each other, which is what attention costs (`dynapar.packing.ticks`, reach).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.errors import SampleError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefixes:
    """What each of n samples shares with others, all of it at its beginning.

    Samples of one id agree in all columns.
    """

    ids: tuple[str, ...]
    """n ids of prefixes; empty for a sample that shares nothing."""
    tokens: IntArray
    """(n,) LLM tokens of the prefix, 1 or more and fewer than the sample's; 0 without one."""
    text_tokens: IntArray
    """(n,) those of them that are not placeholders of media."""
    units: IntArray
    """(n,) how many of the sample's first encoder units lie in the prefix."""

    def take(self, rows: IntArray) -> Prefixes:
        """Of the samples at `rows`, in that order."""
        return Prefixes(
            ids=tuple(self.ids[row] for row in rows),
            tokens=self.tokens[rows],
            text_tokens=self.text_tokens[rows],
            units=self.units[rows],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefixes) and same_fields(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """Which of a step's n samples are trees, and of what; M members in all, tree after tree."""

    prefix_ids: tuple[str, ...]
    """n ids of prefixes; empty for a sample that is no tree."""
    prefix_tokens: IntArray
    """(n,) LLM tokens of the prefix; 0 for a sample that is no tree."""
    prefix_units: IntArray
    """(n,) how many of the first encoder units are the prefix's."""
    offsets: IntArray
    """(n + 1,) where the members of each sample begin; one that is no tree has none."""
    member_ids: tuple[str, ...]
    """M ids of samples of the source."""
    member_tokens: IntArray
    """(M,) LLM tokens of each member, the prefix included."""
    member_labels: IntArray
    """(M,) targets of each member, those in the prefix included: each member counts them."""
    member_units: IntArray
    """(M,) encoder units of each branch, in the order of the tree's units after the prefix's."""

    @property
    def rows(self) -> IntArray:
        """The samples that are trees, ascending."""
        return np.flatnonzero(np.diff(self.offsets))

    def members(self, row: int) -> slice:
        """Where the members of a sample stand in the columns of members."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def squares(self) -> FloatArray:
        """(trees,) for each of `rows`, twice the pairs that see each other, less its tokens."""
        begins, members = self.offsets[self.rows], np.diff(self.offsets)[self.rows]
        if not len(begins):
            return np.zeros(0, np.float64)
        own = np.add.reduceat(self.member_tokens.astype(np.float64) ** 2, begins)
        shared = self.prefix_tokens[self.rows].astype(np.float64) ** 2
        return np.asarray(own - (members - 1) * shared)

    def take(self, rows: IntArray) -> Trees:
        """Of the samples at `rows`, in that order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        flat = np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Trees(
            prefix_ids=tuple(self.prefix_ids[row] for row in rows),
            prefix_tokens=self.prefix_tokens[rows],
            prefix_units=self.prefix_units[rows],
            offsets=offsets,
            member_ids=tuple(self.member_ids[place] for place in flat),
            member_tokens=self.member_tokens[flat],
            member_labels=self.member_labels[flat],
            member_units=self.member_units[flat],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trees) and same_fields(self, other)

    __hash__ = None  # type: ignore[assignment]


def same_fields(one: Prefixes | Trees, other: Prefixes | Trees) -> bool:
    """Whether two records of columns, of one kind, hold the same."""
    pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


class Prefix(NamedTuple):
    """What one sample says of the prefix that it shares."""

    id: str
    tokens: int
    text_tokens: int
    units: int
    """As the columns of `Prefixes`."""


class MediaSize(NamedTuple):
    """What one media item of a sample adds to it."""

    llm_tokens: int
    boundary_tokens: int
    units: int


def read_prefix(
    value: object, where: str, tokens: int, text_tokens: int, media: Sequence[MediaSize]
) -> Prefix:
    """What a metadata line says of its prefix.

    Args:
        value: Such as `{"id": "img7", "tokens": 1182}`; see `dynapar.meta.read_metadata_jsonl`.
        where: What to call the sample in messages.
        tokens: LLM tokens of the sample.
        text_tokens: Those of them that are not placeholders of media.
        media: The sample's media, in order.

    Raises:
        SampleError: It is malformed, leaves nothing of the sample, or does not hold its media.
    """
    if not isinstance(value, dict):
        raise SampleError(f'{where} has prefix {value!r}; expected {{"id": ..., "tokens": ...}}')
    if extra := sorted(set(value) - {"id", "tokens", "media"}):
        raise SampleError(f"{where} has prefix.{extra[0]}; expected id, tokens, and perhaps media")
    name, size = value.get("id"), value.get("tokens")
    if not isinstance(name, str) or not name:
        raise SampleError(f"{where} has prefix.id {name!r}; expected a text")
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < tokens:
        raise SampleError(
            f"{where} of {tokens} tokens has prefix.tokens {size!r}; expected a whole number, 1 or "
            f"more and below the sample's tokens: shorten the prefix, or leave it out"
        )
    whole = [0, *accumulate(each.llm_tokens + each.boundary_tokens for each in media)]
    count = value.get("media", sum(1 for end in whole[1:] if end <= size))
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= len(media):
        raise SampleError(
            f"{where} has prefix.media {count!r}; expected a number of its {len(media)} media items"
        )
    if whole[count] > size:
        raise SampleError(
            f"{where} has prefix.tokens {size}, but its first {count} media items take "
            f"{whole[count]}; expected at least that: count fewer of them in prefix.media"
        )
    held = media[:count]
    text = size - sum(each.llm_tokens for each in held)
    if text > text_tokens:
        raise SampleError(
            f"{where} has prefix.tokens {size}, of which {text} would be text, and it has "
            f"{text_tokens} text tokens; expected no more: a media item that ends after the prefix "
            f"cannot lie in it, so count more of them in prefix.media, or shorten the prefix"
        )
    return Prefix(name, size, text, sum(each.units for each in held))


def collect_prefixes(
    samples: Sequence[tuple[str, Sequence[int], Prefix | None]],
) -> Prefixes | None:
    """The columns of what samples say; None where no sample shares anything.

    Args:
        samples: For each its id, the encoder tokens of its units, and its prefix.

    Raises:
        SampleError: Two samples of one prefix differ in it; both are named.
    """
    first: dict[str, tuple[str, Sequence[int], Prefix]] = {}
    for name, units, prefix in samples:
        if prefix is None:
            continue
        other, own, known = first.setdefault(prefix.id, (name, units, prefix))
        for what, here, there in (
            ("tokens", prefix.tokens, known.tokens),
            ("text tokens", prefix.text_tokens, known.text_tokens),
            ("encoder units", list(units[: prefix.units]), list(own[: known.units])),
        ):
            if here != there:
                raise SampleError(
                    f"sample {name!r} has {here} {what} in prefix {prefix.id!r}, sample {other!r} "
                    f"has {there}; expected the same in all samples of a prefix: give one of them "
                    f"another prefix id"
                )
    if not first:
        return None
    none = Prefix("", 0, 0, 0)
    found = [none if prefix is None else prefix for _, _, prefix in samples]
    return Prefixes(
        ids=tuple(prefix.id for prefix in found),
        tokens=np.array([prefix.tokens for prefix in found], np.int64),
        text_tokens=np.array([prefix.text_tokens for prefix in found], np.int64),
        units=np.array([prefix.units for prefix in found], np.int64),
    )
