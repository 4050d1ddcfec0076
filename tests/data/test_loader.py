from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.control import ControlPlane, control_group
from dynapar.costs import load_costs
from dynapar.data.index import build_index, read_index
from dynapar.data.loader import LoadedStep, StepLoader
from dynapar.data.materialize import Materializer
from dynapar.data.sampler import Sampler
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.sources import open_source
from dynapar.errors import ConfigError, PlanError, SampleError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner import PlannerConfig, homogeneous_plan, plan_step, random_plan
from tests.data.conftest import Demo
from tests.data.small import noise, said, write_lines
from tests.distributed import run_ranks

Planner = Callable[[SampleTable, int], StepPlan]


def planner(ranks: int, plan: Callable[..., StepPlan] = plan_step) -> Planner:
    bound = partial(
        plan,
        cluster=Cluster(nodes=1, ranks_per_node=ranks),
        costs=load_costs(None),
        config=PlannerConfig(capacity=8192, encoder_capacity=40000),
    )
    return lambda samples, step: bound(samples, step=step)


def open_demo(demo: Demo, **settings: Any) -> StepLoader:
    sampler = Sampler(len(demo.index), global_batch=6, seed=1)
    given: dict[str, Any] = {"plan": planner(1), "rank": 0, "steps": 4, "sampler": sampler}
    given |= settings
    materializer = Materializer(demo.shape, demo.source, demo.index)
    return StepLoader(index=demo.index, materializer=materializer, **given)


def ids(step: LoadedStep) -> list[str]:
    return list(step.plan.samples.ids)


def test_steps_come_in_order_and_whole(demo: Demo) -> None:
    with open_demo(demo) as loader:
        steps = list(loader)
    sampler = Sampler(len(demo.index), global_batch=6, seed=1)
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for step in steps:
        np.testing.assert_array_equal(step.rows, sampler.rows(step.step))
        assert ids(step) == [demo.index.table.ids[row] for row in step.rows]
        assert sorted(step.samples) == list(range(6))
        assert {n: s.id for n, s in step.samples.items()} == dict(enumerate(ids(step)))
        targets = int(demo.index.table.label_tokens[step.rows].sum())
        assert (step.targets, step.own_targets, step.stubs) == (targets, targets, ())


def test_ranks_load_what_their_microbatches_hold(demo: Demo) -> None:
    """Text on every rank of a microbatch, each encoder unit on one; targets counted once."""
    plan = planner(3, partial(random_plan, seed=2))
    steps = []
    for rank in range(3):
        with open_demo(demo, plan=plan, rank=rank, steps=2) as loader:
            steps.append(list(loader))
    for here in zip(*steps, strict=True):
        table = here[0].plan.samples
        for microbatch in here[0].plan.microbatches:
            for placement in microbatch.placements:
                loaded = {r: here[r].samples[placement.sample] for r in microbatch.ranks}
                units = [unit for sample in loaded.values() for unit in sample.units]
                assert sorted(units) == list(range(len(table.units(placement.sample))))
                for rank, sample in loaded.items():
                    assert all(placement.encoders[unit] == rank for unit in sample.units)
        assert sum(step.own_targets for step in here) == table.label_tokens.sum()
        for step, rank in zip(here, range(3), strict=True):
            mine = {
                p.sample for m in step.plan.microbatches if rank in m.ranks for p in m.placements
            }
            assert set(step.samples) == mine


def test_the_state_is_that_of_the_steps_taken(demo: Demo) -> None:
    with open_demo(demo, steps=None, ahead=3) as loader:
        whole = [ids(next(loader)) for _ in range(5)]
    with open_demo(demo, steps=None, ahead=3) as loader:
        for _ in range(2):
            next(loader)
        state = loader.state_dict()
    sampler = Sampler(len(demo.index), global_batch=6, seed=1)
    sampler.load_state_dict(state)
    with open_demo(demo, sampler=sampler, first=2, steps=5) as loader:
        assert [ids(step) for step in loader] == whole[2:]


def test_no_more_than_the_asked_steps_are_begun(demo: Demo) -> None:
    begun: list[int] = []
    reached = threading.Event()

    def prepare(plan: StepPlan, samples: Mapping[int, LoadedSample]) -> int:
        begun.append(plan.step)
        if plan.step >= 1:
            reached.set()
        return plan.step * 10

    with open_demo(demo, steps=None, ahead=2, prepare=prepare) as loader:
        assert reached.wait(60)
        assert begun == [0, 1]
        assert next(loader).prepared == 0
    assert begun[:2] == [0, 1]
    assert len(begun) <= 3
    with pytest.raises(StopIteration):
        next(loader)


def test_a_step_is_planned_while_another_loads_and_dropped_on_closing(demo: Demo) -> None:
    good = planner(1)
    made, planned, loading = threading.Event(), threading.Event(), threading.Event()
    loaded = []

    def plan(samples: SampleTable, step: int) -> StepPlan:
        if step == 1:
            planned.set()
        return good(samples, step)

    def prepare(plan: StepPlan, samples: Mapping[int, LoadedSample]) -> None:
        loaded.append(plan.step)
        loading.set()
        assert made.wait(60)
        with loader._changed:
            loader._changed.wait_for(lambda: loader._closing)

    loader = open_demo(demo, plan=plan, prepare=prepare, ahead=2)
    made.set()
    with loader:
        assert loading.wait(60)
        assert planned.wait(60)
    assert loaded == [0]


def test_a_failure_in_the_thread_reaches_training(demo: Demo) -> None:
    good = planner(1)

    def failing(samples: SampleTable, step: int) -> StepPlan:
        if step == 1:
            raise PlanError("no room in step 1")
        return good(samples, step)

    with open_demo(demo, plan=failing) as loader:
        assert next(loader).step == 0
        for _ in range(2):
            with pytest.raises(PlanError, match="no room in step 1") as caught:
                next(loader)
        assert "in failing" in "".join(traceback.format_exception(caught.value))


def test_a_step_over_the_seam_of_epochs_keeps_ids_apart(demo: Demo, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"id": f"s{n}", "messages": [said("a" * 9)]} for n in range(3)]
    )
    source = open_source(str(path))
    build_index(source, demo.shape, tmp_path / "i.parquet")
    index = read_index(tmp_path / "i.parquet")
    with StepLoader(
        index=index,
        sampler=Sampler(3, global_batch=7, seed=0),
        materializer=Materializer(demo.shape, source, index),
        plan=planner(1),
        rank=0,
        steps=3,
    ) as loader:
        steps = list(loader)
    stream = [name for step in steps for name in ids(step)]
    assert sorted(ids(steps[0])) == sorted(set(ids(steps[0])))
    counts = [sum(name.split("#")[0] == f"s{n}" for name in stream) for n in range(3)]
    assert counts == [7, 7, 7]
    assert all(step.samples[n].id == ids(step)[n] for step in steps for n in range(7))


def test_nothing_ahead_is_no_choice(demo: Demo) -> None:
    with pytest.raises(ConfigError, match="ahead is 0"):
        open_demo(demo, ahead=0)


def write_source(folder: Path, demo: Demo) -> None:
    """Eight samples with a picture each; one picture vanishes after indexing."""
    samples = []
    for number in range(8):
        noise(60 + 30 * number, 90, number).save(folder / f"{number}.png")
        asked = {"role": "user", "content": "<image>"}
        samples.append(
            {"id": f"s{number}", "messages": [asked, said("words")], "images": [f"{number}.png"]}
        )
    source = open_source(str(write_lines(folder / "a.jsonl", samples)))
    build_index(source, demo.shape, folder / "i.parquet")
    (folder / "5.png").unlink()


def open_ranks(rank: int, folder: Path, model: str, **settings: Any) -> StepLoader:
    shape, source = load_model_shape(model), open_source(str(folder / "a.jsonl"))
    index = read_index(folder / "i.parquet")
    control = ControlPlane(
        control_group(timedelta(seconds=60)), rank=rank, ranks=2, report=lambda line: None
    )
    given: dict[str, Any] = {
        "plan": planner(2, partial(homogeneous_plan, degree=2)),
        "steps": None,
        "stub_limit": 1.0,
    }
    given |= settings
    return StepLoader(
        index=index,
        sampler=Sampler(8, global_batch=4, seed=0),
        materializer=Materializer(shape, source, index),
        rank=rank,
        control=control,
        **given,
    )


def check_stubs_are_shared(rank: int, folder: Path, model: str) -> None:
    """The rank that cannot decode a picture makes its sample a stub on the other one too."""
    with open_ranks(rank, folder, model, steps=2) as loader:
        steps = list(loader)
    lost = 0
    for step in steps:
        table = step.plan.samples
        good = [n for n in range(4) if table.ids[n] != "s5"]
        lost += len(step.stubs)
        assert step.stubs == tuple(table.ids[n] for n in range(4) if n not in good)
        for number, sample in step.samples.items():
            assert bool(sample.stub) == (number not in good)
            assert bool((sample.targets != IGNORE).any()) == (number in good)
        assert step.targets == int(table.label_tokens[good].sum())
        assert step.agreement is not None
        assert step.agreement.targets_by_rank[rank] == step.own_targets
    assert lost == 1


def check_an_endless_run_stops_together(rank: int, folder: Path, model: str) -> None:
    """Rank 1 closes while it is behind; rank 0, already further on, does not wait in vain."""
    plan = planner(2, partial(homogeneous_plan, degree=2))
    begun, far = [threading.Event() for _ in range(2)]

    def slow(samples: SampleTable, step: int) -> StepPlan:
        if rank == 0 and step == 2:
            far.set()
        if rank == 1 and step == 1:
            begun.wait(60)
            with loader._changed:
                loader._changed.wait_for(lambda: loader._closing)
        return plan(samples, step)

    loader = open_ranks(rank, folder, model, plan=slow, ahead=2)
    begun.set()
    with loader:
        assert next(loader).step == 0
        if rank == 0:
            assert far.wait(60)
    assert loader._failure is None
    assert loader.state_dict()["cursor"] == 4


def check_too_many_stubs_stop_all_ranks(rank: int, folder: Path, model: str) -> None:
    """One rank alone cannot decode the picture, and both stop, at the same step and count."""
    with (
        open_ranks(rank, folder, model, stub_limit=0.04) as loader,
        pytest.raises(SampleError, match=r"1 of [48] samples .* The last is 's5': ") as stopped,
    ):
        list(loader)
    said: list[str | None] = [None, None]
    dist.all_gather_object(said, str(stopped.value))
    counts = [str(line).split(" could not")[0] for line in said]
    assert counts[0] == counts[1]
    assert sum("another rank could not load" in str(line) for line in said) == 1


@pytest.mark.parametrize(
    "check",
    [
        check_stubs_are_shared,
        check_an_endless_run_stops_together,
        check_too_many_stubs_stop_all_ranks,
    ],
)
def test_two_ranks(demo: Demo, tmp_path: Path, check: Callable[..., None]) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    write_source(folder, demo)
    run_ranks(check, 2, tmp_path, folder, str(demo.folder / "model"))


def test_too_many_stubs_reach_training(demo: Demo, tmp_path: Path) -> None:
    write_source(tmp_path, demo)
    index = read_index(tmp_path / "i.parquet")
    source = open_source(str(tmp_path / "a.jsonl"))
    loader = StepLoader(
        index=index,
        sampler=Sampler(8, global_batch=8, seed=0),
        materializer=Materializer(demo.shape, source, index),
        plan=planner(1),
        rank=0,
        stub_limit=0.04,
    )
    with loader, pytest.raises(SampleError, match=r"1 of 8 samples .* could not .* most 4%"):
        next(loader)
