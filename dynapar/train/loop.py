"""Train: take the steps that the loader agreed on, run them, keep their figures and their state.

The loop knows no layout. A step comes with its plan, this rank's samples, and the number of targets
that all ranks agreed on; the executor leaves the whole step's gradient on every rank; clipping and
the optimizer do the same everywhere.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from dynapar.control import ControlPlane, lost_reason
from dynapar.data.loader import LoadedStep, StepLoader
from dynapar.data.stubs import StubCount
from dynapar.errors import CheckFailedError, ControlError, DynaparError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner.speeds import paced_makespan
from dynapar.runtime.executor import StepResult
from dynapar.runtime.layout import ShardLayout
from dynapar.schemes import name_all
from dynapar.speeds import FULL, Pace, SpeedFollower, Speeds, predict_ranks
from dynapar.train import checkpoint
from dynapar.train.config import RunConfig, read_run_config
from dynapar.train.metrics import MetricsWriter, RankTimes, StepRecord
from dynapar.train.parent import follow_parent
from dynapar.train.run import Run, describe, prepare, resume
from dynapar.train.screen import Screen
from dynapar.train.setup import numerics
from dynapar.train.tracker import Tracker, check_trackers, make_trackers, step_scalars

ORDER_LOG = "order_{rank}.jsonl"


def train_command(config_path: Path) -> None:
    """Run `dynapar train CONFIG`, in each process that torchrun starts, or alone.

    Raises:
        DynaparError: Something of the configuration, the data or the ranks is wrong.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow_parent()
    train(read_run_config(config_path))
    dist.destroy_process_group()


def train(config: RunConfig, *, trackers: Sequence[Tracker] = ()) -> None:
    """Train as configured, from the newest checkpoint of the run's folder on.

    Args:
        config: Of the run.
        trackers: Get the scalars of each step on rank 0, beside those of the configuration, and
            are closed there at the end.

    Raises:
        DynaparError: As `prepare` and `resume`; the ranks disagree, or one is gone; the loss is
            no number.
    """
    check_trackers(config)
    with lost_rank("while the ranks met"):
        run = prepare(config)
        done = resume(run)
    start = done.step
    folder, first = config.checkpoint.folder, run.ranks.rank == 0
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(steps=config.steps, start=start, show=first))
        for line in describe(run, start):
            screen.say(line)
        if start >= config.steps:
            return  # what the finished run left stays as it is
        writer, followers = None, []
        if first:
            for tracker in (*trackers, *make_trackers(config, start=start)):
                followers.append(stack.enter_context(closing(tracker)))
            for path in folder.glob(ORDER_LOG.format(rank="*")):
                path.unlink()
            writer = stack.enter_context(closing(MetricsWriter(folder, start=start)))
        speeds = make_follower(run, done, report=screen.say)
        loader = stack.enter_context(open_loader(run, done, report=screen.say, follower=speeds))
        for step in range(start, config.steps):
            with lost_rank(f"in step {step + 1}"):
                record = run_step(run, loader)
                if writer is not None:
                    writer.write(record)
                    for follower in followers:
                        follower.log(step, step_scalars(record.to_json()))
                    screen.say(record.line(steps=config.steps))
                    if record.targets == 0:
                        screen.say(f"step {step + 1} has no target: the optimizer was not stepped")
                _keep(run, step + 1, start=start, loader=loader.state_dict(), screen=screen)
            screen.done(step + 1)


def make_follower(
    run: Run, done: checkpoint.Progress, *, report: Callable[[str], None]
) -> SpeedFollower | None:
    """Follows the ranks' speeds from where a checkpoint left them; None under reference costs.

    Against costs that were not measured here, a rank with another mix of samples looks slow.
    """
    if not run.costs.measured:
        return None
    return SpeedFollower(
        Speeds.from_state(done.loader.get("speeds"), ranks=run.ranks.ranks),
        first=done.step,
        lag=run.config.lookahead + 1,
        report=report,
        unused=run.speeds_unused,
    )


def open_loader(
    run: Run,
    done: checkpoint.Progress,
    *,
    report: Callable[[str], None],
    follower: SpeedFollower | None = None,
) -> StepLoader:
    """Start planning, loading and laying out steps, agreed on by all ranks.

    Args:
        run: The run.
        done: How far it has come: its step is the first one.
        report: Gets a line, on rank 0, for each rank whose targets differ from the planned ones.
        follower: Of the ranks' speeds, by which steps are dealt.
    """
    ranks = run.ranks

    def plan(samples: SampleTable, step: int) -> StepPlan:
        planned = run.planner(samples, step)
        return planned if follower is None else run.deal(planned, follower.at(step).published)

    return StepLoader(
        index=run.index,
        sampler=run.sampler,
        materializer=run.materializer,
        plan=plan,
        rank=ranks.rank,
        first=done.step,
        steps=run.config.steps,
        ahead=run.config.lookahead,
        control=ControlPlane(ranks.control, rank=ranks.rank, ranks=ranks.ranks, report=report),
        prepare=run.executor.prepare,
        stub_limit=run.config.batch.stub_limit,
        counted=StubCount.from_state(done.loader),
        follower=follower,
    )


def run_step(run: Run, loader: StepLoader) -> StepRecord:
    """Run the loader's next step: its gradient, clipped, through the optimizer."""
    began = time.perf_counter()
    loaded = next(loader)
    waited = time.perf_counter() - began
    queue = loaded.prepared
    assert isinstance(queue, tuple)
    with numerics(run.config.precision):
        result = run.executor.run(queue, targets=loaded.targets)
    norm = _update(run, loaded, result)
    ranks = gather_times(run, loaded.plan, queue, result, waited)
    loader.report(own_pace(run, loaded.plan, ranks[run.ranks.rank]))
    equal = Speeds.equal(run.ranks.ranks)
    known = equal if loader.follower is None else loader.follower.at(loaded.step)
    published = equal.published if run.speeds_unused else known.published
    return StepRecord(
        plan=loaded.plan,
        costs=run.costs,
        loss=result.loss,
        gradient_norm=norm,
        targets=loaded.targets,
        seconds=time.perf_counter() - began,
        ranks=ranks,
        speeds=tuple(speed / FULL for speed in published),
        scale=known.scale,
        paced_makespan=paced_makespan(loaded.plan, run.costs, published),
    )


def own_pace(run: Run, plan: StepPlan, times: RankTimes) -> Pace:
    """What this rank's microbatches were to take, and took.

    On CPUs by CPU time, which waiting for peers is no part of. On GPUs by wall clock, and so of
    microbatches of one rank alone: a ring's are as slow as its slowest rank.
    """
    cuda = run.ranks.device.type == "cuda"
    taken = times.microbatches if cuda else times.microbatches_busy
    pairs = [
        (predicted, measured)
        for micro, predicted, measured in zip(
            plan.of_rank(run.ranks.rank), times.predicted, taken, strict=True
        )
        if not cuda or len(micro.ranks) == 1
    ]
    return Pace(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))


def _update(run: Run, loaded: LoadedStep, result: StepResult) -> float:
    """Clip and step; the gradient's norm before clipping.

    A step without targets has the gradient zero. The optimizer is then not stepped: AdamW would
    decay the weights and go on by its running means, which no sample asked for.
    """
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    most = run.config.optimizer.clip_norm
    norm = float(torch.nn.utils.clip_grad_norm_(trained, math.inf if most is None else most))
    if not (math.isfinite(result.loss) and math.isfinite(norm)):
        raise CheckFailedError(
            f"step {loaded.plan.step + 1}: the loss is {result.loss} and the gradient's norm "
            f"{norm}; expected finite numbers. The optimizer was not stepped: lower optimizer.lr, "
            f"and look at the samples {', '.join(loaded.plan.samples.ids[:8])}, ..."
        )
    if loaded.targets:
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


def gather_times(
    run: Run, plan: StepPlan, queue: Sequence[ShardLayout], result: StepResult, waited: float
) -> tuple[RankTimes, ...]:
    """What all ranks ran and measured; a collective call on the data group.

    Args:
        run: The run.
        plan: Of the step.
        queue: That this rank ran.
        result: Of this rank.
        waited: Seconds until this rank's loader had the step.
    """
    ranks, predicted = run.ranks, predict_ranks(plan, run.costs)
    longest, classes = max(map(len, plan.queues)), len(run.executor.adapter.masks)
    shares = [each.scheme.share for shard in queue for each in shard.plans.values()]
    mine = torch.zeros(3 + (2 + classes) * longest, dtype=torch.float64)
    step = (result.busy_seconds, result.seconds, waited)
    for first, times in (
        (0, step),
        (3, result.microbatch_seconds),
        (3 + longest, result.microbatch_busy),
        (3 + 2 * longest, shares),
    ):
        mine[first : first + len(times)] = torch.tensor(times, dtype=torch.float64)
    every = [mine]
    if ranks.ranks > 1:
        mine = mine.to(ranks.device)
        ranks.log.record_collective(
            communicator="data",
            operation="times",
            members=range(ranks.ranks),
            size=mine.nbytes,
        )
        every = [torch.empty_like(mine) for _ in range(ranks.ranks)]
        dist.all_gather(every, mine)
    rows = [row.tolist() for row in every]
    return tuple(
        RankTimes(
            busy=row[0],
            step=row[1],
            waited=row[2],
            microbatches=tuple(row[3 : 3 + len(plan.queues[rank])]),
            microbatches_busy=tuple(row[3 + longest : 3 + longest + len(plan.queues[rank])]),
            predicted=predicted[rank],
            schemes=tuple(
                name_all(len(micro.ranks), [int(share) for share in row[at : at + classes]])
                for micro, at in zip(
                    plan.of_rank(rank), range(3 + 2 * longest, len(row), classes), strict=False
                )
            ),
        )
        for rank, row in enumerate(rows)
    )


def _keep(run: Run, done: int, *, start: int, loader: Mapping[str, object], screen: Screen) -> None:
    """After `done` steps: the order log of the first ones, a checkpoint where one is due."""
    config, log = run.config, run.ranks.log
    folder = config.checkpoint.folder
    recorded = min(start + config.order_steps, config.steps)
    if done == recorded:
        log.save(folder / ORDER_LOG.format(rank=run.ranks.rank))
    if done >= recorded:
        log.operations.clear()
    every = config.checkpoint.every
    if done == config.steps or (every and done % every == 0):
        path = checkpoint.save(
            folder,
            model=run.model,
            optimizer=run.optimizer,
            progress=run.progress(done, loader),
            keep=config.checkpoint.keep,
        )
        screen.say(f"step {done}: saved {path}")


@contextmanager
def lost_rank(where: str) -> Iterator[None]:
    """Say in one line that another rank is gone: the cause is in that rank's output.

    Raises:
        ControlError: A message to or from another rank failed.
    """
    try:
        yield
    except RuntimeError as error:
        text, ours = str(error), isinstance(error, DynaparError)
        if ours or not (isinstance(error, dist.DistError) or "gloo" in text):
            raise
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
        raise ControlError(
            f"rank {rank} lost another rank {where} ({lost_reason(error)}). Look for the "
            "first error of the other ranks"
        ) from error
