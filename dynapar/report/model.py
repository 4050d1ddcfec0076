"""What a report says, as numbers: everything that its page draws and its JSON holds.

Times are seconds, shares are parts of 1. Nothing here is text but names and ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynapar.plan import Sync

MODALITIES = ("text", "image", "video", "audio", "several")
"""How samples are told apart: by their one kind of media; "several" have more than one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What plans must share to be compared: where they run and what they keep to."""

    ranks: int
    ranks_per_node: int
    sync: Sync
    capacity: int
    encoder_capacity: int
    budget: int
    """Bytes of a rank, from which capacities and recompute policies follow; 0 without a budget."""
    costs: str
    """Name of the costs that the plans' times were predicted with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step as it was planned."""

    step: int
    setting: int
    """Index into `Report.settings`."""
    samples: int
    tokens: int
    encoder_tokens: int
    longest: int
    """Tokens of the longest sample."""
    microbatches: int
    tokens_by_degree: Mapping[int, int]
    """LLM tokens of the samples of each degree, ascending."""
    samples_by_degree: Mapping[int, int]
    makespan: float
    lower_bound: float
    gap: float
    optimal: bool
    homogeneous_degree: int
    """0 where no single degree fits, or none was looked for."""
    homogeneous: float
    """Makespan of the best single degree of this step."""
    chosen: Literal["dynamic", "homogeneous"]
    plan_seconds: float
    dealt: bool = False
    """Whether it was dealt for ranks of unequal speed: its makespan and gap are those of equal
    ranks, for which other layouts are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step as it ran; wall clock unless it says otherwise."""

    step: int
    seconds: float
    """From the end of the step before to the end of this one, on rank 0."""
    tokens_per_second: float
    makespan: float
    """Longest time that a rank spent in its microbatches, waiting for peers included."""
    step_seconds: float
    """The same with the closing pass."""
    waited: float
    """Longest wait of a rank for the loader."""
    predicted: float
    """The plan's makespan, on ranks of the speeds that were followed."""
    error: float
    """Measured makespan over the predicted one, minus 1."""
    loss: float
    gradient_norm: float
    least_speed: float
    """Of the slowest rank, as the step was planned; 1 where no speeds are followed."""


class Cell(NamedTuple):
    """Samples or microbatches whose two figures fall into one square of a logarithmic grid."""

    kind: str
    x: float
    """Geometric middle, seconds."""
    y: float
    """Geometric middle, seconds; 0 for what has none."""
    amount: int


class LengthBin(NamedTuple):
    """Samples of low <= tokens < high."""

    low: int
    high: int
    samples: tuple[int, ...]
    """One number each for `MODALITIES`."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityFigures:
    """All samples of one kind, in all steps."""

    name: str
    samples: int
    tokens: int
    longest: int
    encoder_tokens: int
    llm_seconds: float
    """Predicted rank-seconds in the LLM at degree 1."""
    encoder_seconds: float
    """Predicted rank-seconds in the encoders."""


class LongSample(NamedTuple):
    """One of the longest samples."""

    id: str
    step: int
    tokens: int
    encoder_tokens: int
    modality: str
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMix:
    """What the steps are made of; a sample that several steps draw counts each time."""

    samples: int
    tokens: int
    targets: int
    median: int
    """Tokens of the median sample."""
    top_share: float
    """Share of all tokens that the longest 1 % of the samples hold (1 sample at least)."""
    modalities: tuple[ModalityFigures, ...]
    """Those that occur."""
    bins: tuple[LengthBin, ...]
    """Two an octave, from the shortest to the longest."""
    work: tuple[Cell, ...]
    """x: LLM seconds at degree 1, y: encoder seconds, kind: modality."""
    longest: tuple[LongSample, ...]
    """Ten at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """What one way to lay out the compared steps comes to."""

    name: Literal["dynapar", "static", "padded"]
    recompute: str
    """Recompute policies of its microbatches, with commas between."""
    degrees: tuple[int, ...]
    makespans: tuple[float, ...]
    """One a compared step."""
    gain: float
    """How many times dynapar's makespan; the median step."""
    worst_gain: float
    """The same, of the step where dynapar gains least."""
    total_gain: float
    """All compared steps together, closing passes included."""
    padding: float
    """Share of the tokens computed that are padding."""
    tokens_per_second: float
    """Predicted, closing passes included."""
    shares: Mapping[str, float]
    """Where the time of all ranks goes, by `simulate.compare.shares`, parts of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """dynapar's plans beside what others would make of the same samples, priced alike."""

    steps: tuple[int, ...]
    costs: str
    measured: bool
    """Whether the costs were measured on the hardware that they are used for."""
    difference: float
    """Largest relative difference between a plan's own makespan and its price here; 0 where the
    plans were made with these costs."""
    layouts: tuple[LayoutFigures, ...]
    """dynapar first; a layout that fits no step is missing."""


Part = Literal["encoder", "llm", "all"]


class Box(NamedTuple):
    """Time of some ranks in one microbatch."""

    first: int
    width: int
    start: float
    seconds: float
    microbatch: int
    part: Part
    """Of the microbatch: where they are known apart, encoders come first."""


class MicrobatchFigures(NamedTuple):
    """What the boxes of a microbatch say when pointed at."""

    first: int
    width: int
    """Ranks: the ring's size."""
    samples: int
    tokens: int
    encoder_tokens: int
    degree: int
    """The largest of its samples."""
    recompute: str
    """Its recompute policy."""
    longest_id: str
    longest_tokens: int
    seconds: float
    """Predicted."""
    encoder_seconds: float
    """Of them in the encoders, on the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    """One step, rank by rank."""

    step: int
    why: str
    """Why this step is shown, such as "longest"."""
    ranks: int
    shown_ranks: int
    """The first ranks, which are drawn; fewer than all only where all are too many."""
    ranks_per_node: int
    microbatches: Mapping[int, MicrobatchFigures]
    planned: tuple[Box, ...]
    waves: tuple[float, ...]
    """Where waves end, under sync "microbatch"."""
    lower_bound: float
    makespan: float
    measured: tuple[Box, ...]
    """Of one rank each; empty without measurements."""
    measured_steps: tuple[float, ...]
    """For each shown rank, when its closing pass ended; empty without measurements."""


class RankFigures(NamedTuple):
    """One rank over all measured steps."""

    rank: int
    factor: float
    """Median, over its microbatches (without `Measured.cpu` those that it ran alone), of measured
    over predicted, each as a multiple of its step's median rank's; 1 also where there are none."""
    limit: float
    """Factor above which it is a straggler: 1.1, or more where the noise is."""
    microbatches: int
    """How many it is judged by."""
    last: int
    """Steps in which it ended its queue last."""
    straggler: bool
    """Whether it is slower than noise explains."""
    speed: float
    """With which the last measured step was planned; 1 where no speeds are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run measured, beside what was predicted."""

    steps: tuple[MeasuredStep, ...]
    warm_up: int
    """First steps that scales and errors leave out."""
    cpu: bool
    """Whether microbatches are timed by the CPU of each rank, waiting not included; else by the
    wall clock, a ring's by that of its last rank to arrive."""
    scale: float
    """Median of measured over predicted makespan."""
    step_error: float
    """Median distance of a step from `scale` x prediction, as a share of that."""
    microbatch_scale: float
    microbatch_error: float
    """The same of microbatches, as `cpu` says that they are timed."""
    microbatch_error_90: float
    """Distance that 9 of 10 microbatches keep within."""
    pairs: tuple[Cell, ...]
    """x: predicted, y: measured seconds of microbatches, kind: "single" or "ring"."""
    ranks: tuple[RankFigures, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of a report."""

    source: str
    """Name of the file or folder."""
    kind: Literal["plans", "run"]
    version: str
    """Of dynapar."""
    settings: tuple[Setting, ...]
    """The most frequent first."""
    steps: tuple[PlannedStep, ...]
    mix: DataMix
    compared: Compared | None
    """None where it was not asked for or nothing could be compared."""
    gantts: tuple[Gantt, ...]
    measured: Measured | None
    notes: tuple[str, ...] = field(default=())
    """What was left out, assumed or is not as it should be."""
