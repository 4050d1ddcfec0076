"""What a run writes about its steps: one line for people, one JSON line for reports.

`metrics.jsonl` has one line a step, and `plans.jsonl` the plan of each step in its JSON form. A run
that goes on from a checkpoint first drops the lines of the steps that it will run again, so every
step is there once.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from dynapar.costs import TICKS_PER_SECOND, Costs, costs_to_json
from dynapar.plan import StepPlan, plan_digest, plan_to_json

METRICS, PLANS, COSTS = "metrics.jsonl", "plans.jsonl", "costs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank measured in a step; seconds."""

    busy: float
    """CPU time of its training thread, waiting not included."""
    step: float
    """Wall clock of microbatches and closing pass."""
    waited: float
    """Wall clock until the loader had the step."""
    microbatches: tuple[float, ...]
    """Wall clock of each microbatch of its queue, waiting for peers included."""
    microbatches_busy: tuple[float, ...]
    """CPU time of its training thread in each of them, waiting not included."""
    predicted: tuple[float, ...]
    """What the costs say that each of them takes this rank alone, at full speed."""
    schemes: tuple[str, ...]
    """How the ranks of each of them shared attention (`dynapar.schemes.name_all`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A finished step; the same on all ranks but for what rank 0 alone gathers."""

    plan: StepPlan
    costs: Costs
    loss: float
    gradient_norm: float
    """Before clipping."""
    targets: int
    seconds: float
    """Wall clock from the end of the step before to the end of this one, on rank 0."""
    ranks: Sequence[RankTimes]
    speeds: Sequence[float]
    """By rank, the speed that the step was planned with; the fastest rank has 1."""
    scale: float
    """Measured over predicted seconds of a rank of speed 1, as known when the step was planned."""
    paced_makespan: int
    """Ticks of the plan on ranks of these speeds, at scale 1."""

    @property
    def tokens(self) -> int:
        """LLM tokens of the step."""
        return int(self.plan.samples.llm_tokens.sum())

    @property
    def degrees(self) -> dict[int, int]:
        """Samples by degree, ascending."""
        return dict(sorted(Counter(self.plan.columns.degrees.tolist()).items()))

    @property
    def gap(self) -> float:
        """Makespan over lower bound, minus 1."""
        return self.plan.makespan / max(self.plan.lower_bound, 1) - 1

    def line(self, *, steps: int) -> str:
        """For people; `steps` is the run's number of steps."""
        degrees = " ".join(f"{degree}x{count}" for degree, count in self.degrees.items())
        origin = "" if self.costs.measured else " (reference costs)"
        measured = max(times.step for times in self.ranks)
        return (
            f"step {self.plan.step + 1}/{steps}  loss {self.loss:.4f}  "
            f"{self.tokens / self.seconds:,.0f} tokens/s  degrees {degrees}  "
            f"gap {100 * self.gap:.1f} %  "
            f"predicted {self.plan.makespan / TICKS_PER_SECOND:.3g} s{origin}  "
            f"measured {measured:.3g} s"
        )

    def to_json(self) -> dict[str, object]:
        """A line of `metrics.jsonl`; times in seconds."""
        plan = self.plan
        return {
            "step": plan.step,
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "tokens": self.tokens,
            "targets": self.targets,
            "planned_targets": int(plan.samples.label_tokens.sum()),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "degrees": {str(degree): count for degree, count in self.degrees.items()},
            "makespan": plan.makespan / TICKS_PER_SECOND,
            "lower_bound": plan.lower_bound / TICKS_PER_SECOND,
            "gap": self.gap,
            "homogeneous": {
                "degree": plan.homogeneous_degree,
                "makespan": plan.homogeneous_makespan / TICKS_PER_SECOND,
            },
            "chosen": plan.chosen,
            "plan_seconds": plan.plan_seconds,
            "plan_digest": plan_digest(plan),
            "costs": {"name": self.costs.name, "measured": self.costs.measured},
            "speeds": list(self.speeds),
            "scale": self.scale,
            "paced_makespan": self.paced_makespan / TICKS_PER_SECOND,
            "queues": [list(queue) for queue in plan.queues],
            "microbatch_seconds": (plan.columns.ticks / TICKS_PER_SECOND).tolist(),
            "ranks": [asdict(times) for times in self.ranks],
            "ids": list(plan.samples.ids),
        }


class MetricsWriter:
    """Appends to a run's metrics and plans; rank 0 has one."""

    def __init__(self, folder: Path, *, start: int):
        """Open the files, without the lines of step `start` and later ones."""
        _drop_from(folder / METRICS, start)
        _drop_from(folder / PLANS, start)
        self._metrics: IO[str] = (folder / METRICS).open("a", encoding="utf-8")
        self._plans: IO[str] = (folder / PLANS).open("a", encoding="utf-8")
        self._costs: Path | None = folder / COSTS

    def write(self, record: StepRecord) -> None:
        """Add a step; it is in the files when this returns. The first one brings its costs."""
        if self._costs is not None:
            self._costs.write_text(json.dumps(costs_to_json(record.costs)), encoding="utf-8")
            self._costs = None
        for file, row in (
            (self._plans, plan_to_json(record.plan)),
            (self._metrics, record.to_json()),
        ):
            file.write(json.dumps(row) + "\n")
            file.flush()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._plans.close()


def read_steps(path: Path) -> list[Mapping[str, object]]:
    """The whole lines of a file of steps; a last one that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _drop_from(path: Path, start: int) -> None:
    kept = [row for row in read_steps(path) if int(str(row["step"])) < start]
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(temporary, path)
