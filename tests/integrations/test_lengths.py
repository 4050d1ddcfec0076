"""Plans from lengths and two numbers."""

from __future__ import annotations

import numpy as np
import pytest

from dynapar.costs import coefficients, load_costs
from dynapar.errors import CostsError, EmptyStepError, PlanError, SampleError
from dynapar.integrations.lengths import model_costs, plan_lengths, table_of_lengths, timed_costs
from dynapar.packing.ticks import sample_ticks
from dynapar.plan import validate
from tests.test_architecture import heavy_after

LENGTHS = [52_344, 900, 1200, 8000, 640, 2048, 31_000, 77]


def test_a_plan_of_lengths_is_one_of_text_samples() -> None:
    costs = model_costs(hidden=4096, layers=32)
    plan = plan_lengths(LENGTHS, cluster="1x4", capacity=16_384, costs=costs, step=3)
    validate(plan, costs)
    assert plan.step == 3
    assert plan.samples.llm_tokens.tolist() == LENGTHS
    assert plan.samples.label_tokens.tolist() == [length - 1 for length in LENGTHS]
    assert plan.gap < 0.1


def test_arrays_and_rules_are_taken() -> None:
    plan = plan_lengths(
        np.array(LENGTHS, np.int32),  # type: ignore[arg-type]
        cluster="1x4",
        capacity=16_384,
        sync="microbatch",
        degrees="pow2",
        windows="aligned",
        equal_counts=True,
        peer_budget=3,
        max_degree=4,
    )
    validate(plan, load_costs(None))
    assert set(plan.degrees) <= {1, 2, 4}
    assert plan.equal_counts
    assert None not in plan.queues[0]


def test_no_samples_are_refused() -> None:
    with pytest.raises(EmptyStepError):
        plan_lengths([], cluster="1x2", capacity=5)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([5, 0], "lengths[1] is 0; expected the tokens of a sample, a whole number, 1 or more: "),
        ([5.5], "lengths[0] is 5.5; expected the tokens of a sample, a whole number, 1 or more: "),
        ([True], "lengths[0] is True; expected the tokens of a sample, a whole number, 1 or more"),
    ],
)
def test_what_is_no_length_is_named(lengths: list[int], message: str) -> None:
    with pytest.raises(SampleError) as caught:
        table_of_lengths(lengths)
    assert str(caught.value).startswith(message)


def test_a_sample_that_is_too_long_is_named_by_its_index() -> None:
    with pytest.raises(PlanError, match="sample '1' has 50 tokens; 2 ranks x capacity 20 hold 40"):
        plan_lengths([5, 50], cluster="1x2", capacity=20)


def test_two_times_are_what_a_sample_takes() -> None:
    costs = timed_costs(
        seconds_per_token=2e-5, seconds_per_square=3e-9, seconds_per_microbatch=0.01
    )
    known = coefficients(costs, ranks_per_node=8)
    for tokens in (1, 1000, 70_000):
        linear, attention, exchange = sample_ticks(tokens, 1, known)
        assert linear == pytest.approx(20 * tokens, abs=1)
        assert attention == pytest.approx(0.003 * tokens**2, abs=1)
        assert exchange == 0
    assert known.fixed == 10_000
    assert sample_ticks(70_000, 7, known)[2] == 0


def test_width_and_depth_give_the_ratio_that_others_count() -> None:
    """verl's `24576 L + L^2` is 12 h^2 to 2 h at h = 4096; rates differ by 4 : 3 and the backward
    pass of attention costs 2.5 of its forward."""
    known = coefficients(model_costs(hidden=4096, layers=32), ranks_per_node=8)
    ratio = known.linear_token / known.attention_pair
    assert ratio == pytest.approx(24_576 * 3 / 4 * 6 / 3.5)
    double = coefficients(model_costs(hidden=4096, layers=64), ranks_per_node=8)
    assert double.linear_token == pytest.approx(2 * known.linear_token)
    assert double.attention_pair == pytest.approx(2 * known.attention_pair)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_costs(hidden=0, layers=1), "hidden is 0; expected 1 or more"),
        (
            lambda: timed_costs(seconds_per_token=0, seconds_per_square=1),
            "seconds_per_token is 0; expected a finite number above 0",
        ),
        (
            lambda: timed_costs(seconds_per_token=1, seconds_per_square=float("nan")),
            "seconds_per_square is nan; expected a finite number, 0 or more",
        ),
    ],
)
def test_numbers_out_of_range(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CostsError) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["lengths", "megatron", "verl"])
def test_no_torch_is_needed(name: str) -> None:
    assert heavy_after(f"import dynapar.integrations.{name}") == []
