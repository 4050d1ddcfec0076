"""What a report gathers, against slow sums over the lines of the files themselves."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.cluster import Cluster
from dynapar.costs import coefficients, load_costs
from dynapar.memory import MemoryLimits, Piece, Policy, PolicyLimits, costs_under
from dynapar.packing.ticks import sample_ticks, unit_ticks
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig, plan_step
from dynapar.report.gather import Question, gather, spread
from dynapar.report.mix import _median_and_top
from dynapar.report.model import Report
from dynapar.report.source import open_source
from dynapar.report.units import percent
from dynapar.report.words import in_short, pricing
from dynapar.simulate.compare import Scene, compare, gains
from tests.report.small import CLUSTER, config, plans, row_of, table, write_plans, write_run


def report(path: Path, **question: Any) -> Report:
    return gather(open_source(path), Question(**question))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kind(sample: Mapping[str, Any]) -> str:
    names = sample["modalities"]
    return "text" if not names else names[0] if len(names) == 1 else "several"


@pytest.fixture(scope="module", params=["step", "microbatch"])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = plans(sync=request.param)
    return write_plans(tmp_path_factory.mktemp(request.param) / "plans.jsonl", made)


def test_steps_are_what_their_lines_say(planned: Path) -> None:
    for found, line in zip(report(planned).steps, lines(planned), strict=True):
        tokens = {sample["id"]: sample["llm_tokens"] for sample in line["samples"]}
        by_degree: Counter[int] = Counter()
        counts: Counter[int] = Counter()
        for micro in line["microbatches"]:
            for sample in micro["samples"]:
                by_degree[len(sample["ranks"])] += tokens[sample["id"]]
                counts[len(sample["ranks"])] += 1
        assert found.tokens_by_degree == by_degree
        assert found.samples_by_degree == counts
        assert list(found.tokens_by_degree) == sorted(by_degree)
        assert found.samples == len(tokens)
        assert found.tokens == sum(tokens.values())
        assert found.longest == max(tokens.values())
        assert found.encoder_tokens == sum(s["encoder_tokens"] for s in line["samples"])
        assert found.microbatches == len(line["microbatches"])
        assert (found.step, found.makespan, found.lower_bound, found.gap, found.homogeneous) == (
            line["step"],
            line["makespan"],
            line["lower_bound"],
            line["gap"],
            line["homogeneous"]["makespan"],
        )


def test_the_mix_counts_every_sample_once(planned: Path) -> None:
    mix = report(planned).mix
    samples = [sample for line in lines(planned) for sample in line["samples"]]
    lengths = [sample["llm_tokens"] for sample in samples]
    assert (mix.samples, mix.tokens) == (len(samples), sum(lengths))
    assert mix.targets == sum(sample["label_tokens"] for sample in samples)
    assert mix.median == sorted(lengths)[len(lengths) // 2]
    priced = coefficients(load_costs(None), ranks_per_node=CLUSTER.ranks_per_node)
    for figures in mix.modalities:
        own = [sample for sample in samples if kind(sample) == figures.name]
        units = [unit for sample in own for unit in sample["encoder_units"]]
        llm = sum(sum(sample_ticks(sample["llm_tokens"], 1, priced)) for sample in own)
        assert figures.samples == len(own) > 0
        assert figures.tokens == sum(sample["llm_tokens"] for sample in own)
        assert figures.longest == max(sample["llm_tokens"] for sample in own)
        assert figures.encoder_tokens == sum(units)
        assert figures.llm_seconds == pytest.approx(llm / 1e6)
        encoded = sum(unit_ticks(unit, priced) for unit in units)
        assert figures.encoder_seconds == pytest.approx(encoded / 1e6)
    assert sum(figures.samples for figures in mix.modalities) == len(samples)
    for row in mix.bins:
        inside = [length for length in lengths if row.low <= length < row.high]
        assert (sum(row.samples), sum(row.tokens)) == (len(inside), sum(inside))
    assert sum(sum(row.samples) for row in mix.bins) == len(samples)
    assert sum(cell.amount for cell in mix.work) == len(samples)
    longest = sorted(lengths, reverse=True)[:10]
    assert [sample.tokens for sample in mix.longest] == longest


@given(st.lists(st.integers(1, 60), min_size=1, max_size=300))
def test_median_and_top_share_are_those_of_the_sorted_lengths(lengths: list[int]) -> None:
    ordered = sorted(lengths, reverse=True)
    top = sum(ordered[: max(1, len(lengths) // 100)]) / sum(lengths)
    median_length, share = _median_and_top(Counter(lengths))
    assert median_length == sorted(lengths)[len(lengths) // 2]
    assert share == pytest.approx(top)


def test_others_are_those_that_simulate_compares(planned: Path) -> None:
    found = report(planned)
    sync: Sync = "microbatch" if found.settings[0].sync == "microbatch" else "step"
    scene = Scene(
        batches=tuple(table(step) for step in range(4)),
        cluster=CLUSTER,
        costs=load_costs(None),
        config=config(sync),
    )
    runs = {run.label: run for run in compare(scene, ("static", "padded")).runs}
    assert found.compared is not None
    assert found.compared.difference == 0
    assert [layout.name for layout in found.compared.layouts] == list(runs)
    for layout in found.compared.layouts:
        run = runs[layout.name]
        assert layout.makespans == tuple(ticks / 1e6 for ticks in run.makespans)
        ratios = gains(run, runs["dynapar"])
        assert (layout.gain, layout.worst_gain) == (median(ratios), min(ratios))
        work = sum(layout.shares[key] for key in ("llm", "encoder", "exchange", "fixed"))
        assert work + layout.shares["idle"] == pytest.approx(1, abs=2e-5)
        assert layout.recompute == "none"
    static, padded = found.compared.layouts[1:]
    assert static.padding == 0 < padded.padding < 1


def test_others_keep_to_the_budget_of_the_plans(tmp_path: Path) -> None:
    """Each under the one recompute policy, of those that every plan allows, that is shortest."""
    policies: dict[Policy, int] = {"none": 1300, "full": 4000}
    memory = MemoryLimits(
        budget=10**9,
        policies=tuple(
            PolicyLimits(
                policy=policy,
                pieces=(Piece(0, 10**9 // (2 * tokens), 10**9 // (8 * tokens)),),
                capacity=tokens,
                encoder_capacity=4 * tokens,
            )
            for policy, tokens in policies.items()
        ),
    )
    made = [
        plan_step(
            table(step),
            step=step,
            cluster=CLUSTER,
            costs=load_costs(None),
            config=replace(config("step"), memory=memory),
        )
        for step in range(2)
    ]
    found = report(write_plans(tmp_path / "p.jsonl", made)).compared
    assert found is not None
    assert found.difference == 0
    static = found.layouts[1]
    scenes = {
        policy: Scene(
            batches=(table(0), table(1)),
            cluster=CLUSTER,
            costs=costs_under(load_costs(None), policy),
            config=PlannerConfig(capacity=tokens, encoder_capacity=4 * tokens),
        )
        for policy, tokens in policies.items()
    }
    totals = {}
    for policy, scene in scenes.items():
        runs = {run.label: run for run in compare(scene, ("static",)).runs}
        if "static" in runs:
            totals[policy] = sum(runs["static"].makespans) / 1e6
    assert static.recompute == min(totals, key=lambda policy: totals[policy])
    assert sum(static.makespans) == pytest.approx(min(totals.values()))
    used = {micro.recompute for plan in made for micro in plan.microbatches}
    assert set(found.layouts[0].recompute.split(", ")) == used


def test_fewer_steps_are_compared_where_asked(planned: Path) -> None:
    some = report(planned, compare=2).compared
    assert some is not None
    assert some.steps == (0, 3)
    assert report(planned, compare=0).compared is None


@given(st.lists(st.integers(), min_size=1, max_size=40, unique=True), st.integers(1, 50))
def test_spread_keeps_order_and_both_ends(items: list[int], most: int) -> None:
    found = spread(items, most)
    assert len(found) == min(most, len(items))
    assert found == [item for item in items if item in set(found)]
    if most > 1:
        assert (found[0], found[-1]) == (items[0], items[-1])


def test_measured_figures_of_a_run(tmp_path: Path) -> None:
    made = plans(6)
    found = report(write_run(tmp_path / "run", made)).measured
    assert found is not None
    for step, plan in zip(found.steps, made, strict=True):
        row: Any = row_of(plan)
        totals = [sum(rank["microbatches"]) for rank in row["ranks"]]
        assert step.makespan == pytest.approx(max(totals))
        assert step.error == pytest.approx(1e6 * max(totals) / plan.makespan - 1)
        assert step.tokens_per_second == pytest.approx(
            plan.samples.llm_tokens.sum() / row["seconds"]
        )
        assert step.waited == 0.01
    assert found.warm_up == 1
    assert found.scale == pytest.approx(2, rel=0.02)
    assert found.microbatch_scale == pytest.approx(2, rel=0.02)
    assert found.microbatch_error_90 < 0.03
    assert sum(cell.amount for cell in found.pairs) == sum(len(p.microbatches) for p in made)
    assert not any(rank.straggler for rank in found.ranks)
    alone = Counter(m.ranks[0] for p in made for m in p.microbatches if len(m.ranks) == 1)
    assert {rank.rank: rank.microbatches for rank in found.ranks if rank.microbatches} == alone
    assert sum(rank.last for rank in found.ranks) == len(made)


def test_a_slow_rank_is_a_straggler_and_its_ring_is_not(tmp_path: Path) -> None:
    made = plans(8)
    alone = Counter(m.ranks[0] for p in made for m in p.microbatches if len(m.ranks) == 1)
    slow = alone.most_common(1)[0][0]
    found = report(write_run(tmp_path / "run", made, slow={slow: 1.9})).measured
    assert found is not None
    assert [rank.rank for rank in found.ranks if rank.straggler] == [slow]
    assert found.ranks[slow].factor == pytest.approx(1.9, rel=0.05)


def test_cpu_times_tell_a_slow_rank_that_is_always_in_a_ring(tmp_path: Path) -> None:
    """By the wall clock its ring is as slow as it is; by its own CPU time it alone is."""
    made = [plan for plan in plans(8) if all(len(m.ranks) > 1 for m in plan.microbatches)]
    assert len(made) >= 3
    walls = report(write_run(tmp_path / "walls", made, slow={2: 1.9})).measured
    assert walls is not None
    assert not any(rank.straggler for rank in walls.ranks)
    found = report(write_run(tmp_path / "cpu", made, slow={2: 1.9}, cpu=True)).measured
    assert found is not None
    assert (walls.cpu, found.cpu) == (False, True)
    assert [rank.rank for rank in found.ranks if rank.straggler] == [2]
    assert found.ranks[2].factor == pytest.approx(1.9, rel=0.02)
    assert found.microbatch_scale == pytest.approx(3, rel=0.02)
    assert [step.predicted for step in found.steps] == [
        pytest.approx(1.5e-6 * plan.makespan) for plan in made
    ]
    assert found.ranks[2].speed == found.steps[0].least_speed == pytest.approx(1 / 1.9)
    entries = sum(len(plan.queue(rank)) for plan in made for rank in range(8))
    assert sum(cell.amount for cell in found.pairs) == entries


def test_a_ring_is_timed_by_its_last_rank(tmp_path: Path) -> None:
    """Its ranks that come early measure their wait, too; a prediction begins when all are there."""
    made = [plan for plan in plans(6) if any(len(m.ranks) > 1 for m in plan.microbatches)]
    found = report(write_run(tmp_path / "run", made)).measured
    assert found is not None
    rings = [cell for cell in found.pairs if cell.kind == "ring"]
    assert rings
    for cell in rings:
        assert cell.y / cell.x == pytest.approx(2, rel=0.4)  # a square of the grid is 33 % wide


def test_gantts_hold_what_was_planned_and_measured(tmp_path: Path) -> None:
    made = plans()
    folder = write_run(tmp_path / "run", made)
    found = report(folder, show=(1, 3))
    assert [(gantt.step, gantt.why) for gantt in found.gantts] == [
        (1, "asked for"),
        (3, "asked for"),
    ]
    for gantt in found.gantts:
        plan = made[gantt.step]
        for number, micro in enumerate(plan.microbatches):
            boxes = [box for box in gantt.planned if box.microbatch == number]
            assert sum(box.seconds for box in boxes) == pytest.approx(micro.ticks / 1e6)
            assert boxes[0].start == pytest.approx(micro.start / 1e6)
            assert {(box.first, box.width) for box in boxes} == {(micro.ranks[0], len(micro.ranks))}
            degrees = [len(place.ranks) for place in micro.placements]
            assert gantt.microbatches[number].degree == max(degrees)
        row: Any = row_of(plan)
        for rank, times in enumerate(row["ranks"]):
            boxes = [box for box in gantt.measured if box.first == rank]
            assert [box.seconds for box in boxes] == times["microbatches"]
            assert [box.microbatch for box in boxes] == list(plan.queue(rank))
            for before, after in itertools.pairwise(boxes):
                assert after.start == pytest.approx(before.start + before.seconds)


def test_llm_parts_of_a_wave_begin_together(tmp_path: Path) -> None:
    made = plans(sync="microbatch")
    found = report(write_plans(tmp_path / "p.jsonl", made), show=(0,)).gantts[0]
    plan = made[0]
    waves = plan.wave_of_microbatches().tolist()
    for box in found.planned:
        wave = plan.waves[waves[box.microbatch]]
        begin = wave.start + (wave.encoder if box.part == "llm" else 0)
        assert box.start == pytest.approx(begin / 1e6)
        assert box.start + box.seconds <= found.makespan + 1e-9


def test_settings_are_told_apart(tmp_path: Path) -> None:
    """A run that went on with fewer ranks: the most frequent setting is compared."""
    small = plans(2, cluster=Cluster(nodes=1, ranks_per_node=4))
    large = plans(5)[2:]
    found = report(write_plans(tmp_path / "p.jsonl", [*small, *large]))
    assert [setting.ranks for setting in found.settings] == [8, 4]
    assert [step.setting for step in found.steps] == [1, 1, 0, 0, 0]
    assert found.compared is not None
    assert found.compared.steps == (2, 3, 4)
    assert found.notes == (
        "The steps were planned under 2 settings (ranks 8 and 4): what is compared are 3 of 5 "
        "steps, those of the most frequent one.",
    )


def test_steps_dealt_for_unequal_ranks_are_compared_with_nothing(tmp_path: Path) -> None:
    """Their makespans are those of equal ranks, for which static may well be shorter."""
    made = plans(4)
    folder = write_run(tmp_path / "run", made)
    rows = lines(folder / "metrics.jsonl")
    for row in rows:
        row["speeds"] = [1.0] * 7 + [0.5 if row["step"] in (1, 2) else 1.0]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report(folder)
    assert [step.dealt for step in found.steps] == [False, True, True, False]
    assert found.compared is not None
    assert found.compared.steps == (0, 3)
    said = [" ".join(sentence) for sentence in in_short(found)]
    mean = (made[0].gap + made[3].gap) / 2
    assert said[1].startswith(f"{percent(mean)} above the proven lower bound")
    assert "2 steps of 4 were dealt for ranks of unequal speed (the slowest at 0.50)" in pricing(
        found
    )
    assert "count neither in the mean gap nor in the comparison" in pricing(found)
    for row in rows:
        row["speeds"] = [0.5] + [1.0] * 7
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    every = report(folder)
    assert every.compared is not None
    assert every.compared.steps == (0, 1, 2, 3)
    assert "count neither" not in pricing(every)


def test_of_two_ranks_the_slow_one_is_held_against_the_fast_one(tmp_path: Path) -> None:
    two = [
        plan_step(
            table(step).draw(np.arange(1, 24)), step=step,
            cluster=Cluster(nodes=1, ranks_per_node=2), costs=load_costs(None),
            config=config("step"),
        )
        for step in range(6)
    ]  # fmt: skip
    found = report(write_run(tmp_path / "run", two, slow={1: 2.0}, cpu=True)).measured
    assert found is not None
    assert [rank.factor for rank in found.ranks] == pytest.approx([1.0, 2.0], rel=0.03)
    assert [rank.straggler for rank in found.ranks] == [False, True]
