from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from dynapar.errors import ConfigError
from dynapar.plan import Sync
from dynapar.simulate import Noise, expected_makespan, from_plan, replay
from dynapar.simulate.noise import draw_factors, slow_factors
from tests.simulate.oracle import simulate
from tests.simulate.scenes import COSTS, some_plan


def test_factors_have_mean_one_and_the_asked_for_spread() -> None:
    schedule = from_plan(some_plan(0, "step", samples=64), COSTS)
    noise = Noise(microbatch=0.2, rank=0.1)
    draws = [draw_factors(schedule, noise, step=3, draw=k) for k in range(400)]
    ranks = np.concatenate([own for own, _ in draws])
    micro = np.concatenate([shared for _, shared in draws])
    for factors, sigma in ((ranks, 0.1), (micro, 0.2)):
        assert factors.mean() == pytest.approx(1.0, abs=0.01)
        assert np.log(factors).std() == pytest.approx(sigma, rel=0.05)


def test_a_rank_is_slow_in_the_same_draw_whoever_schedules() -> None:
    one, other = (from_plan(some_plan(seed, "step"), COSTS) for seed in (1, 2))
    noise = Noise()
    left, right = (draw_factors(s, noise, step=1, draw=7)[0] for s in (one, other))
    assert left.tolist() == right.tolist()
    assert draw_factors(one, noise, step=2, draw=7)[0].tolist() != left.tolist()
    assert draw_factors(one, Noise(seed=1), step=1, draw=7)[0].tolist() != left.tolist()


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_the_expected_makespan_is_the_mean_over_all_draws(sync: Sync) -> None:
    schedule = from_plan(some_plan(4, sync), COSTS)
    noise = Noise(draws=5, seed=9, slow=((1, 1.25),))
    seen = []
    for draw in range(5):
        own, shared = draw_factors(schedule, noise, step=2, draw=draw)
        seen.append(simulate(schedule, own.tolist(), shared.tolist())[0])
    assert expected_makespan(schedule, noise, step=2) == pytest.approx(fmean(seen))


@pytest.mark.parametrize("sync", ["step", "microbatch"])
def test_noise_of_nothing_changes_nothing(sync: Sync) -> None:
    plan = some_plan(6, sync)
    noise = Noise(microbatch=0.0, rank=0.0, draws=2)
    assert expected_makespan(from_plan(plan, COSTS), noise, step=0) == plan.makespan


def test_a_slow_rank_slows_what_it_takes_part_in() -> None:
    schedule = from_plan(some_plan(7, "step", cluster="1x1"), COSTS)
    slowed = replay(schedule, rank_factors=slow_factors(1, ((0, 2.0),)))
    assert slowed.makespan == 2 * replay(schedule).makespan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatch": -0.1}, r"Noise.microbatch is -0.1; expected a sigma"),
        ({"rank": 2.0}, r"Noise.rank is 2.0; expected a sigma"),
        ({"draws": 0}, r"Noise has 0 draws"),
        ({"slow": ((0, 0.0),)}, r"slow rank 0 has factor 0.0; expected .* above 0"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Noise(**arguments)  # type: ignore[arg-type]


def test_a_slow_rank_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"slow rank 8 is not there: ranks are 0..7"):
        slow_factors(8, ((8, 1.5),))
