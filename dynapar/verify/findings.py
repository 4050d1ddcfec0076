"""What `verify` compares and what it finds, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynapar.plan import StepPlan
from dynapar.train.config import Precision
from dynapar.verify.gradients import Difference, relative

TOLERANCE: Mapping[Precision, float] = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1.5}
"""Largest relative difference of loss and gradient. bfloat16: largest distance to the float32
reference, as a multiple of the distance of one process in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One global batch in the reference."""

    step: int
    rows: tuple[int, ...]
    """Of the index."""
    targets: int
    """N of the gradient rule, as materialised."""
    tokens: int
    modalities: Mapping[str, int]
    """Samples by what they hold."""
    stubs: Mapping[int, str]
    """Rows of samples that could not be loaded, and why; they have no loss, here and on ranks."""
    loss: float
    one_process: Difference | None
    """bfloat16 only: the distance of one process in bfloat16 from the float32 reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plan of one global batch."""

    batch: Batch
    name: str
    """Of the plan: "planned" or "random K"."""
    plan: StepPlan
    """Its samples are the batch's rows, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One trial compared with the reference, on the rank that is farthest from it."""

    trial: Trial
    loss: float
    """Relative difference of the loss."""
    gradient: Difference
    rings: Mapping[str, int]
    """Rings by how they shared attention."""

    @property
    def degrees(self) -> dict[int, int]:
        """Samples by the degree that they ran at, ascending."""
        found: dict[int, int] = {}
        for microbatch in self.trial.plan.microbatches:
            for placement in microbatch.placements:
                degree = len(placement.ranks)
                found[degree] = found.get(degree, 0) + 1
        return dict(sorted(found.items()))

    @property
    def score(self) -> float:
        """What is held against the tolerance."""
        alone = self.trial.batch.one_process
        if alone is None:
            return max(self.loss, self.gradient.whole, self.gradient.worst)
        return relative(self.gradient.whole, alone.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that `verify` found."""

    batches: tuple[Batch, ...]
    trials: tuple[Finding, ...]
    dropout: tuple[str, ...]
    """The modules whose dropout was switched off."""
    order: str
    """Why the ranks' communication would not get through in order; empty where it would."""
    messages: int
    """Batches of messages and collectives that were replayed, over all ranks."""

    def passed(self, tolerance: float) -> bool:
        """Whether every trial is within the tolerance and the order holds."""
        return not self.order and all(finding.score <= tolerance for finding in self.trials)
