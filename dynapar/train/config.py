"""What a training run is, as written in its YAML file.

Relative paths start at the folder of the file, so that a configuration means the same from wherever
it is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from dynapar.catalog import load_model_shape
from dynapar.config import load_config
from dynapar.errors import ConfigError
from dynapar.memory import (
    MemoryLimits,
    MemoryModel,
    Policy,
    memory_limits,
    parse_bytes,
    parse_policies,
)
from dynapar.plan import Sync
from dynapar.rings import Degrees, RingRules, Windows
from dynapar.schemes import SchemeAsked, SchemeRules

Precision = Literal["float32", "bfloat16", "float64"]
"""float32; bfloat16 (autocast, float32 parameters); float64 (for checks)."""

Scheduler = Literal["dynamic", "homogeneous", "random"]
"""Layouts by cost; one degree for the whole step; random valid layouts (for checks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSection:
    """How each step is planned."""

    capacity: int = 0
    """LLM tokens that one rank may hold in one microbatch; left out with `memory`."""
    encoder_capacity: int = 0
    """Encoder tokens that one rank may encode in one microbatch; left out with `memory`."""
    memory: str | None = None
    """Bytes of a rank's device, such as "80GB", from which both capacities follow."""
    recompute: tuple[Policy, ...] = ()
    """With `memory`: what a microbatch may keep for backward, as the planner chooses; "none",
    "selective" and "full" where none is named. "offload" has not run on a GPU yet."""
    sync: Sync = "step"
    """Where ranks meet. This version trains models that every rank holds whole: "step"."""
    max_degree: int | None = None
    """The largest degree; None for no limit of its own."""
    degrees: Degrees = "any"
    """Degrees that samples may have: "any", or powers of two alone ("pow2")."""
    windows: Windows = "any"
    """Where a ring of d ranks may start: "any" rank, or "aligned" at multiples of d."""
    peer_budget: int | None = 64
    """Distinct other ranks that a rank may meet in the whole run; None for all."""
    equal_counts: bool = False
    """Whether all ranks run equally many microbatches."""
    gate: float = 0.0
    """Prefer one degree for all where it is within this share of the dynamic makespan."""
    noise: float = 0.05
    """How far a microbatch's time strays from its prediction (sigma of its logarithm): among
    layouts that are hardly longer the one of the least expected time is taken; 0: the shortest."""
    scheduler: Scheduler = "dynamic"
    """Which planner."""
    degree: int | None = None
    """Of the scheduler "homogeneous"; None for the best one of each step."""

    def __post_init__(self) -> None:
        if self.memory is None:
            _at_least(1, capacity=self.capacity, encoder_capacity=self.encoder_capacity)
            if self.recompute:
                raise ConfigError(
                    f"recompute is {list(self.recompute)} without memory; expected both, since "
                    "the budget decides what must be recomputed. Give memory, as 80GB, or leave "
                    "recompute out of the planner's section"
                )
        RingRules(
            degrees=self.degrees,
            windows=self.windows,
            peer_budget=self.peer_budget,
            max_degree=self.max_degree,
        )
        if self.degree is not None:
            _at_least(1, degree=self.degree)
            if self.scheduler != "homogeneous":
                raise ConfigError(
                    f"degree is {self.degree} with scheduler {self.scheduler!r}; expected none. "
                    'Set scheduler: homogeneous, or limit the degree by "max_degree"'
                )
        _at_least(0, gate=self.gate, noise=self.noise)
        if self.sync != "step":
            raise ConfigError(
                f"sync is {self.sync!r}; expected 'step' for training, since every rank holds the "
                "whole model. Plan for sharded parameters with `dynapar plan --sync microbatch`"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSection:
    """How rings share attention, and by what their messages go."""

    scheme: SchemeAsked = "auto"
    """"auto": the cheapest for each ring by the costs, staged where they do not say; or for all
    rings "staged", "ulysses", or "hybrid" with `share`."""
    share: int | None = None
    """With "hybrid": ranks of a group, which share heads; rings of d ranks have groups of
    gcd(share, d)."""
    stages: int | None = None
    """Exchanges over which a ring's other ranks, or groups, are spread; None is one for each, 1
    fetches all rows at once."""
    pool: bool = False
    """Give every window that a ring may be a process group of its own, made at the start: for a
    backend on which messages between some ranks of a large group do not get through."""

    def __post_init__(self) -> None:
        self.rules  # noqa: B018

    @property
    def rules(self) -> SchemeRules:
        """What it says about schemes."""
        return SchemeRules(scheme=self.scheme, share=self.share, stages=self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """Which samples a step has."""

    samples: int
    """Samples of a global batch."""
    block: int = 1
    """Consecutive samples that the shuffle keeps near each other; 1 shuffles fully."""
    group_by: Literal["prefix"] | None = None
    """"prefix": samples of one prefix go into one step, where a tree computes it once; `samples`
    is then the most that a step has. None: all stay apart."""
    stub_limit: float = 0.05
    """Largest share of the run's samples that may fail to load (of 20 or more); above it the run
    stops."""

    def __post_init__(self) -> None:
        _at_least(1, samples=self.samples, block=self.block)
        if not 0 <= self.stub_limit <= 1:
            raise ConfigError(f"stub_limit is {self.stub_limit}; expected 0 to 1, a share")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW and gradient clipping."""

    lr: float
    """Learning rate."""
    weight_decay: float = 0.0
    """Of matrices; vectors (biases, norms) have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the denominator."""
    clip_norm: float | None = 1.0
    """Largest norm of the whole gradient; None for no clipping."""

    def __post_init__(self) -> None:
        _at_least(0, lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {list(self.betas)}; expected each 0 or more, below 1")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(
                f"clip_norm is {self.clip_norm}; expected above 0, or null for no clipping"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Where a run keeps its checkpoints, metrics and order logs."""

    folder: Path
    """The run's folder; a run that finds a checkpoint there goes on from it."""
    every: int = 0
    """Steps between checkpoints; 0 for one at the end alone."""
    keep: int = 2
    """Newest checkpoints that stay on disk."""
    tensorboard: bool = False
    """Whether rank 0 also writes each step's scalars as TensorBoard events, in the folder's
    `tensorboard`; needs the extra dynapar[tensorboard]."""

    def __post_init__(self) -> None:
        _at_least(0, every=self.every)
        _at_least(1, keep=self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySection:
    """What `dynapar verify` runs."""

    steps: int = 2
    """Global batches to compare."""
    samples: int | None = None
    """Samples of each; None for the configuration's own global batch."""
    ranks: int = 4
    """Processes that it starts."""
    plans: int = 2
    """Random plans of each batch, beside the planner's own."""
    tolerance: float | None = None
    """Largest relative difference of the gradient; None for the precision's own."""

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps, ranks=self.ranks)
        _at_least(0, plans=self.plans)
        if self.samples is not None:
            _at_least(1, samples=self.samples)
        if self.tolerance is not None:
            _at_least(0, tolerance=self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A training run; what `dynapar train` and `dynapar verify` read."""

    model: Path
    """Folder with config.json, preprocessor_config.json and tokenizer.json; weights are random
    unless the folder has them as safetensors."""
    source: str
    """The samples: a conversation file, or webdataset shards `shards-{000..007}.tar`."""
    index: Path
    """Of the source, from `dynapar index`."""
    planner: PlannerSection
    batch: BatchSection
    optimizer: OptimizerSection
    steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    checkpoint: CheckpointSection
    attention: AttentionSection = field(default_factory=AttentionSection)
    seed: int = 0
    """Of random weights and of the order of samples."""
    precision: Precision = "float32"
    costs: Path | None = None
    """Costs file; None for the reference that dynapar ships, and the run says so."""
    force_costs: bool = False
    """Whether to plan by costs that were measured on other hardware or of another model."""
    ranks_per_node: int | None = None
    """None: all ranks are on one node."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at a time."""
    lookahead: int = 2
    """Steps that are planned, loaded and agreed on ahead of the one that runs."""
    timeout_seconds: float = 600.0
    """Longest wait for another rank; longer than the longest step."""
    recompute: bool = False
    """Recompute the layers' activations in backward instead of keeping them."""
    order_steps: int = 3
    """First steps of a run whose communication is recorded for `dynapar check-order`."""
    verify: VerifySection = field(default_factory=VerifySection)

    def __post_init__(self) -> None:
        _at_least(0, seed=self.seed, order_steps=self.order_steps)
        _at_least(1, steps=self.steps, loss_chunk=self.loss_chunk)
        _at_least(2, lookahead=self.lookahead)
        if self.ranks_per_node is not None:
            _at_least(1, ranks_per_node=self.ranks_per_node)
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds is {self.timeout_seconds}; expected above 0")
        if self.recompute and self.planner.memory is not None:
            raise ConfigError(
                f"recompute is true with planner.memory {self.planner.memory}; expected one of "
                "them: recompute repeats all layers of all microbatches, memory lets the planner "
                "choose for each. Leave one out, or set planner.recompute: [full]"
            )
        if self.precision == "float64" and self.recompute:
            raise ConfigError(
                "precision is 'float64' with recompute; expected recompute: false, since layers "
                "that are recomputed would round to float32"
            )


def read_run_config(path: str | Path) -> RunConfig:
    """Read a run's configuration; its relative paths then start at the file's folder.

    Raises:
        ConfigError: As `dynapar.config.load_config`; or a value is out of its range.
    """
    config = load_config(RunConfig, path)
    folder = Path(path).parent
    config = replace(
        config,
        model=folder / config.model,
        source=str(folder / Path(config.source).expanduser()),
        index=folder / config.index,
        costs=None if config.costs is None else folder / config.costs,
        checkpoint=replace(config.checkpoint, folder=folder / config.checkpoint.folder),
    )
    return with_capacities(config)


def with_capacities(config: RunConfig) -> RunConfig:
    """The same run with the capacities that follow from its memory, where that is given.

    Raises:
        ConfigError: Capacities are given as well, or nothing fits; the message has the bytes.
        ModelError: The model's folder has no readable configuration.
    """
    section = config.planner
    for name in ("capacity", "encoder_capacity"):
        if section.memory is not None and (value := getattr(section, name)):
            raise ConfigError(
                f"planner.{name} is {value} with memory {section.memory}; expected none, since it "
                "follows from memory: leave one out"
            )
    limits = memory_of(config)
    if limits is None:
        return config
    section = replace(section, capacity=limits.capacity, encoder_capacity=limits.encoder_capacity)
    return replace(config, planner=section)


def memory_of(config: RunConfig) -> MemoryLimits | None:
    """What fits into the run's memory under each policy; None where capacities are given.

    Counted is a model that every rank holds whole, with DDP's buckets, and the buffers of as many
    peers as the budget allows.

    Raises:
        ConfigError: Nothing fits.
        ModelError: The model's folder has no readable configuration.
    """
    section = config.planner
    if section.memory is None:
        return None
    model = MemoryModel(
        shape=load_model_shape(str(config.model)),
        sharding="ddp",
        ranks=2,
        low_precision=config.precision == "bfloat16",
        loss_chunk=config.loss_chunk,
        peers=section.peer_budget or 0,
    )
    policies = parse_policies(section.recompute or ("none", "selective", "full"))
    return memory_limits(model, memory=parse_bytes(section.memory), policies=policies)


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} is {value}; expected {least} or more")
