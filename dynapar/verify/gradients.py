"""How far two gradients of one model are apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan
from typing import NamedTuple

import torch
from torch import Tensor, nn

SMALLEST_SHARE = 1e-3
"""Of the largest parameter's norm. Gradients below it (biases of keys are zero in exact
arithmetic) are measured against it, since rounding is all that they hold."""


class Difference(NamedTuple):
    """Of a gradient from the one that was wanted, relative."""

    whole: float
    """Norm of the difference of the whole gradient / norm of the wanted one."""
    worst: float
    """The largest such share of one parameter."""
    parameter: str
    """Its name; empty where no parameter is trained."""


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients of all trained parameters, zeros where there is none yet."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> Difference:
    """Compare two gradients of the same parameters, in float64.

    Args:
        got: By the name of the parameter.
        want: The same names and shapes.

    Returns:
        Infinite shares where the wanted gradient is zero and the other one is not, and where a
        number is not finite.

    Raises:
        ValueError: The names differ.
    """
    if got.keys() != want.keys():
        odd = sorted(got.keys() ^ want.keys())
        raise ValueError(f"gradients of {odd[0]!r} exist on one side only; expected both")
    apart = {name: _norm(got[name].double() - want[name].double()) for name in want}
    norms = {name: _norm(want[name].double()) for name in want}
    least = SMALLEST_SHARE * max(norms.values(), default=0.0)
    shares = {name: relative(apart[name], max(norms[name], least)) for name in want}
    worst = max(shares, key=shares.__getitem__, default="")
    return Difference(
        whole=relative(_total(apart), _total(norms)),
        worst=shares.get(worst, 0.0),
        parameter=worst,
    )


def _norm(values: Tensor) -> float:
    return float(values.norm())


def _total(norms: Mapping[str, float]) -> float:
    return float(sum(norm * norm for norm in norms.values()) ** 0.5)


def relative(apart: float, norm: float) -> float:
    """`apart` / `norm`; infinite where that is not a number, 0 where both are 0."""
    if apart == 0:
        return 0.0
    share = abs(apart / norm) if norm else inf
    return inf if isnan(share) else share
