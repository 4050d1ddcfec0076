"""Explain a sample: what its media become, what it costs, and which degree it needs.

Pure arithmetic on sizes; reading files is `dynapar.inspect_command`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import unwrap
from typing import NamedTuple

from dynapar.cluster import Cluster
from dynapar.costs import TICKS_PER_SECOND, Costs, coefficients
from dynapar.flops import PARTS, Part, TrainingWork, Tuning, sample_work, training_flops
from dynapar.packing.ticks import latency_ticks, reach_ticks, unit_ticks
from dynapar.rings import RingRules, allowed_degrees
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, MediaTokens, ModelShape


class Item(NamedTuple):
    """A media item and where it comes from."""

    label: str
    """Kind and size in the file, such as "image of 480 x 640 pixels"."""
    tokens: MediaTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A sample to explain."""

    id: str
    text_tokens: int
    """LLM tokens that are no placeholders, boundary tokens of its media among them."""
    items: tuple[Item, ...]

    @property
    def llm_tokens(self) -> int:
        """LLM tokens in all."""
        return self.text_tokens + sum(item.tokens.llm_tokens for item in self.items)

    @property
    def units(self) -> list[int]:
        """Encoder tokens of each encoder unit."""
        return [tokens for tokens, _ in self.heard_units]

    @property
    def heard_units(self) -> list[tuple[int, bool]]:
        """Encoder tokens of each encoder unit, and whether it is an audio clip."""
        media = [item.tokens for item in self.items]
        return [(m.unit_tokens, m.kind == AUDIO_KIND) for m in media for _ in range(m.units)]


def describe_media(shape: ModelShape, item: Item) -> Iterator[str]:
    """How an item's tokens come about, a step a line."""
    tokens, vision = item.tokens, shape.vision
    if tokens.kind == AUDIO_KIND:
        encoder = shape.audio_encoder
        assert encoder is not None
        yield f"{tokens.size[1]:,} mel frames of {1000 * encoder.hop / encoder.sample_rate:g} ms"
        yield f"convolved by 2: {tokens.unit_tokens:,} encoder tokens in 1 unit"
        yield f"attention in windows of {encoder.window // 2} tokens"
        yield f"pooled by 2: {tokens.llm_tokens:,} LLM tokens"
    else:
        high, wide = tokens.size
        if tokens.frames:
            yield f"{len(tokens.frames):,} frames used"
        yield f"resized to {high:,} x {wide:,} pixels{_limits(shape, tokens)}"
        units, rows, columns = tokens.grid
        extra = f" + {tokens.class_tokens}" if tokens.class_tokens else ""
        what = "unit" if units == 1 else "units"
        yield (
            f"{rows} x {columns}{extra} patches of {vision.patch} pixels, {units:,} {what}: "
            f"{units * tokens.unit_tokens:,} encoder tokens"
        )
        if vision.window:
            full = len(vision.full_layers)
            yield (
                f"attention in windows of {vision.window} x {vision.window} patches, over the "
                f"whole unit in {full} of {vision.layers} layers"
            )
        merge = f"merged {vision.merge} x {vision.merge}: " if vision.merge > 1 else ""
        yield f"{merge}{tokens.llm_tokens:,} LLM tokens"
        if tokens.keys:
            yield f"{tokens.keys:,} keys of cross-attention"
    if tokens.boundary_tokens:
        yield f"{tokens.boundary_tokens:,} text tokens around and between them"


def _limits(shape: ModelShape, tokens: MediaTokens) -> str:
    rules = shape.image_rules if tokens.kind == IMAGE_KIND else shape.video_rules
    if rules.max_pixels:
        multiple = shape.vision.patch * shape.vision.merge
        return (
            f" (multiples of {multiple}; {rules.min_pixels:,} to {rules.max_pixels:,} pixels as "
            f"the processor is set)"
        )
    if shape.tile_rules.tokens:
        return f" ({tokens.units:,} tiles of {shape.tile_rules.edge} pixels, overviews counted)"
    return f" (longest side {shape.tile_rules.edge:,} at most)" if shape.tile_rules.edge else ""


def training_work(
    shape: ModelShape, subject: Subject, frozen: Sequence[Part] = ()
) -> tuple[TrainingWork, ...]:
    """FLOPs of the sample by module; `frozen` parts are not trained."""
    media = [item.tokens for item in subject.items]
    tuning: Mapping[Part, Tuning] = {part: "frozen" if part in frozen else "full" for part in PARTS}
    return training_flops(sample_work(shape, subject.llm_tokens, media), tuning)


class AtDegree(NamedTuple):
    """The sample when so many ranks share it."""

    degree: int
    tokens: int
    """LLM tokens of the fullest rank."""
    encoder_tokens: int
    """Encoder tokens of the fullest rank, its units dealt out largest first."""
    seconds: float
    """Of its slowest rank, without the microbatch's fixed part."""
    fits: bool
    """Whether every rank holds its share."""


def degrees(
    subject: Subject,
    *,
    cluster: Cluster,
    costs: Costs,
    capacity: int,
    encoder_capacity: int,
    rings: RingRules | None = None,
) -> list[AtDegree]:
    """The sample at every degree that the planner may give it, alone in its microbatch.

    Args:
        subject: The sample.
        cluster: The ranks.
        costs: Price it.
        capacity: LLM tokens of a rank.
        encoder_capacity: Encoder tokens of a rank.
        rings: What narrows the degrees; None for the planner's own rules.
    """
    constants = coefficients(costs, ranks_per_node=cluster.ranks_per_node)
    own = replace(costs, encoder=costs.audio or costs.encoder)
    of_audio = coefficients(own, ranks_per_node=cluster.ranks_per_node)
    # As plain functions: loading the compiled ones takes longer than these few calls.
    sample, unit_time, latency = unwrap(reach_ticks), unwrap(unit_ticks), unwrap(latency_ticks)
    found = []
    for degree in allowed_degrees(cluster, rings or RingRules()):
        loads = [0] * degree
        times = [0] * degree
        for unit, heard in sorted(subject.heard_units, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += unit
            times[rank] += unit_time(unit, of_audio if heard else constants)
        share = max(
            _share(subject.llm_tokens, degree, position) for position in range(min(degree, 2))
        )
        tokens = subject.llm_tokens
        ticks = sum(sample(tokens, float(tokens), degree, constants)) + max(times)
        ticks += latency(degree, constants) + constants.linear_rank
        fits = share <= capacity and max(loads) <= encoder_capacity
        found.append(AtDegree(degree, share, max(loads), ticks / TICKS_PER_SECOND, fits))
    return found


def _share(tokens: int, degree: int, position: int) -> int:
    """Tokens of a rank: two of 2 x degree pieces."""
    cuts = [tokens * i // (2 * degree) for i in range(2 * degree + 1)]
    mirror = 2 * degree - 1 - position
    return cuts[position + 1] - cuts[position] + cuts[mirror + 1] - cuts[mirror]


def choose(
    table: Sequence[AtDegree],
    subject: Subject,
    *,
    capacity: int,
    encoder_capacity: int,
    narrowed: str = "",
) -> tuple[int, str]:
    """The least degree that holds the sample, 0 for none, and why.

    Args:
        table: From `degrees`.
        subject: The sample.
        capacity: LLM tokens of a rank.
        encoder_capacity: Encoder tokens of a rank.
        narrowed: What keeps the largest degree below the cluster's, from `dynapar.rings.narrowing`.
    """
    fitting = [row for row in table if row.fits]
    most = max(subject.units, default=0)
    if not fitting:
        last = table[-1]
        what = f"{last.tokens:,} LLM tokens (capacity {capacity:,})"
        if last.tokens <= capacity:
            what = f"{last.encoder_tokens:,} encoder tokens (capacity {encoder_capacity:,})"
        hint = " One encoder unit alone is too large." if most > encoder_capacity else ""
        by = f" ({narrowed})" if narrowed else ""
        return 0, f"at degree {last.degree}, the largest{by}, a rank would hold {what}.{hint}"
    chosen = fitting[0]
    if chosen.degree == 1:
        return 1, (
            f"one rank holds it: {chosen.tokens:,} of {capacity:,} LLM tokens, "
            f"{chosen.encoder_tokens:,} of {encoder_capacity:,} encoder tokens"
        )
    before = table[table.index(chosen) - 1]
    what = (
        f"{before.tokens:,} LLM tokens, capacity is {capacity:,}"
        if before.tokens > capacity
        else f"{before.encoder_tokens:,} encoder tokens, capacity is {encoder_capacity:,}"
    )
    return chosen.degree, f"at degree {before.degree} a rank would hold {what}"
