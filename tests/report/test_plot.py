"""Axes, labels and shapes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.report.colours import colour, css, lighter
from dynapar.report.plot import SIZE, apart, dot, linear, logarithmic, path, rect, table, thinned

VALUES = st.floats(1e-6, 1e9)


@given(st.floats(-1e6, 1e6), VALUES, st.integers(1, 10))
def test_a_linear_axis_has_round_labels_inside_it(low: float, span: float, marks: int) -> None:
    axis = linear(low + span, "t", low=low, marks=marks)
    assert axis.at(axis.low) == 0
    assert axis.at(axis.high) == 1
    places = [axis.at(value) for value, _ in axis.marks]
    assert places == sorted(places)
    assert len(places) <= marks + 2
    for value, text in axis.marks:
        step = abs(axis.marks[1][0] - axis.marks[0][0]) if len(axis.marks) > 1 else span
        assert float(text.replace(",", "")) == pytest.approx(value, abs=step / 50 + 1e-9)


def test_labels_have_the_decimals_that_their_step_needs() -> None:
    assert [text for _, text in linear(2.5, "t").marks] == [
        "0.0", "0.5", "1.0", "1.5", "2.0", "2.5",
    ]  # fmt: skip
    assert [text for _, text in linear(1.0, "t", marks=4).marks] == [
        "0.00", "0.25", "0.50", "0.75", "1.00",
    ]  # fmt: skip
    assert linear(10_000, "t", marks=2).marks[-1] == (10_000, "10,000")


@given(VALUES, st.floats(1.01, 1e6), st.floats(0, 1))
def test_a_logarithmic_axis_has_equal_ratios(low: float, ratio: float, share: float) -> None:
    axis = logarithmic(low, low * ratio, "t", [(low * ratio**share, "x"), (low / 2, "outside")])
    assert axis.at(low * ratio**share) == pytest.approx(share, abs=1e-6)
    assert [text for _, text in axis.marks] == ["x"]
    assert axis.at(0.0) == 0


def test_labels_that_stand_too_near_are_left_out() -> None:
    axis = linear(10, "t", marks=10)
    assert [value for value, _ in apart(axis, 0.25).marks] == [0, 3, 6, 9]
    assert thinned([(float(n), str(n)) for n in range(7)], 3) == [
        (0.0, "0"), (3.0, "3"), (6.0, "6"),
    ]  # fmt: skip


@given(*[st.floats(0, 1)] * 4)
def test_boxes_cover_their_places(a: float, b: float, c: float, d: float) -> None:
    left, right, bottom, top = min(a, b), max(a, b), min(c, d), max(c, d)
    text = rect(left, right, bottom, top, "kind")
    found = {name: int(value) for name, value in re.findall(r'(\w+)="(\d+)"', text)}
    assert found["x"] == round(SIZE * left)
    assert found["x"] + found["width"] in (round(SIZE * right), found["x"] + 1)
    assert found["y"] == round(SIZE * (1 - top))
    assert found["y"] + found["height"] in (round(SIZE * (1 - bottom)), found["y"] + 1)


def test_what_is_shown_is_escaped() -> None:
    assert 'data-tip="a&quot;&lt;b&gt;&amp;"' in rect(0, 1, 0, 1, "k", 'a"<b>&')
    assert 'data-tip="&lt;"' in dot(0, 0, "k", tip="<")
    assert "<td>&lt;i&gt;</td>" in table(("<h>",), [("<i>",)])
    assert path([(0, 0), (0.5, 1)], "k") == ('<polyline points="0,10000 5000,0" class="line k"/>')


def test_every_degree_has_a_colour_of_its_own() -> None:
    degrees = [*range(1, 9), *range(12, 257, 4)]
    assert len({colour(degree) for degree in degrees}) == len(degrees)
    assert colour(512) == colour(256)
    assert lighter("#000000") == "#7f7f7f"
    assert css([2, 1, 2]).count("{") == 4


def test_the_style_names_no_place_outside() -> None:
    folder = Path(__file__).parents[2] / "dynapar" / "report"
    for name in ("page.css", "page.js"):
        text = (folder / name).read_text("ascii")
        assert re.search(r"https?:|@import|url\(|fetch\(|XMLHttp", text) is None
