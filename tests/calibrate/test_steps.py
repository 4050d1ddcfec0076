"""The scale that a run follows, and the picture of predicted and measured times."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from dynapar.calibrate.picture import draw
from dynapar.calibrate.steps import Checked, followed

TIMES = [[(0.2, 0), (0.5, 0), (0.4, 1)], [(0.3, 0), (0.6, 1)], [(1.0, 0), (0.1, 1), (0.7, 1)]]


def checked(scale: float) -> tuple[list[Checked], list[Checked]]:
    """Three steps on two ranks that take `scale` times what was predicted."""
    micros = [
        Checked(step, rank, 1, seconds, seconds * scale, 0.02)
        for step, row in enumerate(TIMES)
        for seconds, rank in row
    ]
    steps = [Checked(step, -1, 0, 1.0, scale, 0.02) for step in range(len(TIMES))]
    return micros, steps


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.3])
def test_a_machine_that_is_slower_as_a_whole_is_followed(scale: float) -> None:
    micros, steps = followed(*checked(scale))
    assert [c.step for c in steps] == [1, 2]
    assert len(micros) == 5
    for c in (*micros, *steps):
        assert c.error == pytest.approx(0.0, abs=1e-9)


def test_a_single_long_microbatch_is_still_an_error() -> None:
    micros, steps = checked(1.0)
    micros[-1] = micros[-1]._replace(measured=2.0)
    assert followed(micros, steps)[0][-1].error == pytest.approx(0.7 / 2.0 - 1)


def test_the_picture_has_all_of_them_inside() -> None:
    micros, steps = checked(1.9)
    root = ElementTree.fromstring(draw(micros, [*steps, steps[0]._replace(measured=0.001)]))
    dots = [e for e in root if e.tag.endswith("circle") and e.get("r") == "4"]
    assert len(dots) == len(micros) + len(steps) + 1 + 3  # three in the legend
    for dot in dots:
        assert 0 < float(dot.get("cx", -1)) < 640
        assert 0 < float(dot.get("cy", -1)) < 420
