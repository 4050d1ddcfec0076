"""How far gradients are apart, against numbers worked out by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import nn

from dynapar.verify.gradients import Difference, difference, gradients, relative


def test_whole_and_worst() -> None:
    want = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    got = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([0.0, 4.4])}
    found = difference(got, want)
    assert found.whole == pytest.approx(0.5 / 5.0)
    assert found.worst == pytest.approx(0.1)
    assert found.parameter in ("a", "b")


def test_a_gradient_that_is_zero_in_exact_arithmetic_is_held_against_the_largest() -> None:
    want = {"weight": torch.tensor([10.0]), "bias": torch.tensor([1e-9])}
    got = {"weight": torch.tensor([10.0]), "bias": torch.tensor([3e-9])}
    found = difference(got, want)
    assert found.worst == pytest.approx(2e-9 / 1e-2)
    assert found.parameter == "bias"


@pytest.mark.parametrize("odd", [nan, inf])
def test_what_is_no_number_is_infinitely_far(odd: float) -> None:
    want = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    for name in want:
        got = {**want, name: torch.tensor([odd])}
        assert difference(got, want) == Difference(inf, inf, name)


def test_from_zero() -> None:
    zero = {"a": torch.zeros(2)}
    assert difference(zero, zero) == Difference(0.0, 0.0, "a")
    assert difference({"a": torch.ones(2)}, zero).whole == inf
    assert relative(-1.0, -2.0) == 0.5


def test_missing_parameters_are_named() -> None:
    with pytest.raises(ValueError, match="gradients of 'b' exist on one side only"):
        difference({"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.zeros(1)})


def test_gradients_are_copies_of_what_is_trained() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert gradients(model).keys() == {"weight"}
    model(torch.ones(2)).backward()
    before = gradients(model)
    model(torch.ones(2)).backward()
    assert torch.equal(before["weight"], torch.ones(1, 2))
    assert torch.equal(gradients(model)["weight"], torch.full((1, 2), 2.0))
