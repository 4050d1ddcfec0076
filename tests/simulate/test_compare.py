from __future__ import annotations

from statistics import median

import pytest

from dynapar.cluster import Cluster
from dynapar.errors import ConfigError
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig, plan_step
from dynapar.simulate import Noise, expected_makespan, from_plan
from dynapar.simulate.compare import ALL, OURS, Scene, compare, rows, shares, traffic_share
from dynapar.simulate.peers import PEERS
from dynapar.simulate.peers.process import PeerProcess
from dynapar.workloads import draw
from tests.samples import table
from tests.simulate.scenes import COSTS, config, random_table


def scene_of(sync: Sync, *, steps: int = 2, noise: Noise | None = None) -> Scene:
    return Scene(
        batches=tuple(random_table(seed, 30, longest=40_000) for seed in range(steps)),
        cluster=Cluster.parse("2x4"),
        costs=COSTS,
        config=config(sync),
        noise=noise,
    )


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_dynapar_is_never_behind(sync: Sync) -> None:
    found = compare(scene_of(sync, steps=4), [name for name in ALL if name not in PEERS])
    labels = [run.label for run in found.runs]
    assert labels[:3] == [OURS, "homogeneous", "static"]
    assert {"padded", "padded-best"} <= set(labels)
    assert found.notes == ()
    totals = {run.label: sum(run.makespans) for run in found.runs}
    assert totals["padded-best"] <= totals["padded"]
    assert totals["static"] == min(t for label, t in totals.items() if label.startswith("static"))
    for row in rows(found):
        assert float(row["worst"]) >= 1.0, row
        assert float(row["gap %"]) >= 0.0, row


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_the_figures_of_a_row(sync: Sync) -> None:
    noise = Noise(draws=3)
    scene = scene_of(sync, steps=3, noise=noise)
    plans = [
        plan_step(s, step=k, cluster=scene.cluster, costs=COSTS, config=scene.config)
        for k, s in enumerate(scene.batches)
    ]
    found = compare(scene, ["padded"])
    ours, padded = rows(found)
    closing = {"step": 0.25, "microbatch": 0.05}[sync]
    mean = sum(plan.makespan for plan in plans) / 3e6
    bounds = sum(plan.lower_bound for plan in plans)
    noisy = [
        expected_makespan(from_plan(plan, COSTS), noise, step=k) for k, plan in enumerate(plans)
    ]
    assert ours["makespan s"] == pytest.approx(mean, abs=1e-6)
    assert ours["step s"] == pytest.approx(mean + closing, abs=1e-6)
    assert ours["gap %"] == pytest.approx(100 * (mean * 3e6 / bounds - 1), abs=1e-3)
    assert ours["noisy s"] == pytest.approx(sum(noisy) / 3e6, abs=1e-6)
    assert (ours["gain"], ours["worst"], ours["with closing"], ours["padding %"]) == (1, 1, 1, 0)
    tokens = sum(int(s.llm_tokens.sum()) for s in scene.batches)
    assert ours["tokens/s"] == pytest.approx(tokens / 3 / (mean + closing), rel=1e-5)

    theirs = found.runs[1].makespans
    ratios = [there / plan.makespan for there, plan in zip(theirs, plans, strict=True)]
    assert padded["gain"] == pytest.approx(median(ratios), abs=1e-4)
    assert padded["worst"] == pytest.approx(min(ratios), abs=1e-4)
    whole = (sum(theirs) / 3e6 + closing) / (mean + closing)
    assert padded["with closing"] == pytest.approx(whole, abs=1e-4)
    computed = sum(s.computed_tokens for s in found.runs[1].schedules)
    assert padded["padding %"] == pytest.approx(100 * (1 - tokens / computed), abs=1e-3)
    assert float(padded["padding %"]) > 0


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_shares_add_up(sync: Sync) -> None:
    for run in compare(scene_of(sync)).runs:
        share = shares(run)
        whole = sum(share[f"{name} %"] for name in ("llm", "encoder", "exchange", "fixed", "idle"))
        assert whole == pytest.approx(100, abs=0.01)
        causes = sum(value for name, value in share.items() if name.startswith("idle "))
        assert causes - share["idle %"] == pytest.approx(share["idle %"], abs=0.01)


def test_traffic_that_rules_is_seen() -> None:
    scene = Scene(
        batches=(draw("flat", 64, seed=0, longest=16_384),),
        cluster=Cluster.parse("1x8"),
        costs=COSTS,
        config=config("microbatch"),
    )
    found = compare(scene, ["static"])
    assert [traffic_share(run) for run in found.runs] == [0.0, 0.0]
    small = Scene(
        batches=(draw("flat", 8, seed=0, longest=16_384),),
        cluster=Cluster.parse("1x8"),
        costs=COSTS,
        config=config("microbatch"),
    )
    assert traffic_share(compare(small, []).runs[0]) == 1.0


def test_slow_ranks_count_without_noise() -> None:
    plain = compare(scene_of("step"), ["static"])
    slow = compare(
        scene_of("step", noise=Noise(draws=1, slow=tuple((rank, 2.0) for rank in range(8)))),
        ["static"],
    )
    for one, other in zip(plain.runs, slow.runs, strict=True):
        assert other.makespans == tuple(2 * ticks for ticks in one.makespans)


def test_who_cannot_run_is_noted() -> None:
    """A node of 5 has degrees 1 and 5: the long sample needs 5, the encoder units need 1 rank."""
    scene = Scene(
        batches=(table([40_000]),),
        cluster=Cluster.parse("1x5"),
        costs=COSTS,
        config=PlannerConfig(capacity=16_384, encoder_capacity=65_536, max_degree=3),
    )
    found = compare(scene, ["static"])
    assert [run.label for run in found.runs] == [OURS]
    assert len(found.notes) == 1
    assert found.notes[0].startswith("static: there is no static layout: no single degree holds")


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_peers_are_set_beside_it(sync: Sync) -> None:
    """Those that are installed; docs/benchmarks/planner.md says where one of them is ahead."""
    found = compare(scene_of(sync), PEERS)
    labels = [run.label for run in found.runs]
    missing = {note.partition(":")[0] for note in found.notes}
    assert labels == [OURS, *(name for name in PEERS if name not in missing)]
    assert {"dhp", "entrain"} <= set(labels)
    for run, row in zip(found.runs, rows(found), strict=True):
        assert run.steps == (0, 1)
        assert float(row["gap %"]) >= 0.0
        assert row["padding %"] == 0.0


def test_a_peer_that_is_not_installed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    process = PeerProcess("tests.simulate.peers.absent")
    for place in ("dynapar.simulate.peers", "dynapar.simulate.compare"):
        monkeypatch.setattr(f"{place}.peer", lambda name: process)
    found = compare(scene_of("step"), ["megatron"])
    assert [run.label for run in found.runs] == [OURS]
    assert found.notes == ("megatron: absent is not installed; pip install absent==1",)


def test_steps_that_a_peer_fails_are_left_out_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three steps are one peer's whose plans hold at most 16,384 tokens on rank 0."""
    process = PeerProcess("tests.simulate.peers.fake")
    for place in ("dynapar.simulate.peers", "dynapar.simulate.compare"):
        monkeypatch.setattr(f"{place}.peer", lambda name: process)
    scene = Scene(
        batches=(table([20_000, 50]), table([900, 800]), table([17_000])),
        cluster=Cluster.parse("1x4"),
        costs=COSTS,
        config=config("step"),
        noise=Noise(draws=2),
    )
    found = compare(scene, ["dhp"])
    process.close()
    ours, theirs = found.runs
    assert (ours.steps, theirs.steps) == ((0, 1, 2), (1,))
    assert len(theirs.expected) == len(theirs.makespans) == 1
    assert found.notes == (
        "dhp: failed at 2 of 3 steps, which its row leaves out; step 0: over capacity: position 0 "
        "of microbatch 0 has 20,000 tokens; capacity is 16,384",
    )
    row = list(rows(found))[1]
    assert row["gain"] == pytest.approx(theirs.makespans[0] / ours.makespans[1], abs=1e-4)
    bound = found.bounds[1]
    assert row["gap %"] == pytest.approx(100 * (theirs.makespans[0] / bound - 1), abs=1e-3)
    closing = 250_000
    whole = (theirs.makespans[0] + closing) / (ours.makespans[1] + closing)
    assert row["with closing"] == pytest.approx(whole, abs=1e-4)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"scheduler 'best' is unknown; expected all, or some of"):
        compare(scene_of("step"), ["best"])
    empty = Scene(batches=(), cluster=Cluster.parse("1x4"), costs=COSTS, config=config("step"))
    with pytest.raises(ConfigError, match="there are no steps to compare"):
        compare(empty)


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("step", {"static": (1, 1_207_764), "padded": (1, 2_060_440)}),
        ("microbatch", {"static": (1, 1_217_952), "padded": (1, 2_060_440)}),
    ],
)
def test_record_of_a_small_case(sync: Sync, expected: dict[str, tuple[int, int]]) -> None:
    """What others do with 64 documents on one node, in ticks; it changes only with a reason."""
    scene = Scene(
        batches=(draw("docs", 64, seed=0, longest=8 * 16_384),),
        cluster=Cluster.parse("1x8"),
        costs=COSTS,
        config=config(sync),
    )
    runs = {run.label: run for run in compare(scene, list(expected)).runs[1:]}
    found = {label: (run.schedules[0].degrees[0], run.makespans[0]) for label, run in runs.items()}
    assert found == expected
