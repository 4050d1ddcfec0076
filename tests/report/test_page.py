"""The page: well formed, alone, escaped, of bearable size, and its figures in words."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynapar.meta import SampleTable
from dynapar.report.gather import Question, gather
from dynapar.report.model import Compared, LayoutFigures, Report
from dynapar.report.page import page
from dynapar.report.source import open_source
from dynapar.report.words import in_short, pricing
from tests.report.small import plans, write_plans, write_run

VOID = {"meta", "br", "link", "img", "input", "hr"}
EVIL = ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a&b'c\nd", "]]>")


class Reader(HTMLParser):
    """Holds that tags are closed in order and ids are unique; keeps what is of interest."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tips: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "data-tip":
                self.tips.append(value or "")
            if name == "href":
                self.links.append(value or "")
            if name in ("src", "srcset", "action", "data", "poster", "xlink:href"):
                self.loads.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def evil(table: SampleTable) -> SampleTable:
    return replace(table, ids=(*EVIL, *table.ids[len(EVIL) :]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("page") / "run"
    made = [replace(plan, samples=evil(plan.samples)) for plan in plans(5)]
    return gather(open_source(write_run(folder, made)), Question())


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("waves") / "p.jsonl"
    return gather(open_source(write_plans(path, plans(2, sync="microbatch"))), Question())


@pytest.fixture(params=["run", "waves"])
def report(request: pytest.FixtureRequest) -> Report:
    found: Report = request.getfixturevalue(request.param)
    return found


def test_the_page_is_well_formed_and_loads_nothing(report: Report) -> None:
    html = page(report, command="dynapar report 'a b'")
    reader = read(html)
    assert html.startswith("<!DOCTYPE html>")
    assert reader.loads == []
    assert {"link", "img", "iframe", "object", "use", "image"}.isdisjoint(reader.tags)
    assert re.search(r"https?:|//[a-z]|@import|url\(", html) is None
    assert "default-src 'none'" in html
    assert reader.tags.count("script") == 1
    assert reader.handlers == []


def test_every_link_has_its_place(report: Report) -> None:
    reader = read(page(report))
    assert reader.links
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    buttons = re.findall(r'data-step="([^"]+)"', page(report))
    assert buttons
    assert set(buttons) <= set(reader.ids)


def test_ids_of_samples_are_text_and_nothing_else(run: Report) -> None:
    html = page(run)
    reader = read(html)
    assert reader.tags.count("script") == 1
    assert all(name not in html for name in EVIL[:2])
    shown = [sample.id for sample in run.mix.longest]
    assert EVIL[0] in shown
    for name in shown:
        assert name in unescape(html)
    assert any(EVIL[0] in tip for tip in reader.tips)


def test_names_of_files_and_costs_are_escaped(run: Report) -> None:
    settings = (replace(run.settings[0], costs="<b>c</b>"), *run.settings[1:])
    html = page(replace(run, source="<i>s</i>", settings=settings, notes=("<u>n</u>",)))
    read(html)
    assert not any(mark in html for mark in ("<b>c", "<i>s", "<u>n"))
    for text in ("&lt;b&gt;c", "&lt;i&gt;s", "&lt;u&gt;n"):
        assert text in html


def test_shapes_stay_inside_their_area(report: Report) -> None:
    html = page(report)
    for name, most in (("x", 10_000), ("y", 10_000), ("width", 10_000), ("height", 10_000)):
        values = [int(value) for value in re.findall(rf'<rect [^>]*\b{name}="(-?\d+)"', html)]
        assert values
        assert min(values) >= 0
        assert max(values) <= most


def test_every_class_of_a_shape_has_a_colour(report: Report) -> None:
    html = page(report)
    style = html[html.index("<style>") : html.index("</style>")]
    body = html[html.index("</style>") :]
    kinds = {kind for text in re.findall(r'class="([^"]+)"', body) for kind in text.split()}
    lettered = {kind for kind in kinds if re.match(r"[mplud]-|d\d", kind)}
    assert lettered
    assert {kind for kind in lettered if f".{kind}" not in style} == set()


def test_both_themes_are_there(run: Report) -> None:
    html = page(run)
    assert "@media (prefers-color-scheme: dark)" in html
    dark = re.findall(r"color-scheme: dark;(.*?)}", html, flags=re.S)
    assert len(dark) == 2
    assert dark[0].split() == dark[1].split()


def test_charts_of_a_run_come_with_a_run_alone(run: Report, waves: Report) -> None:
    for name in ("prediction", "throughput", "stragglers"):
        assert f'id="{name}"' in page(run)
        assert f'id="{name}"' not in page(waves)
    assert "as measured</h3>" in page(run)
    assert "as measured</h3>" not in page(waves)


def test_speeds_are_drawn_where_plans_follow_them(run: Report) -> None:
    assert 'id="speeds"' not in page(run)
    assert run.measured is not None
    steps = tuple(replace(step, least_speed=0.5) for step in run.measured.steps)
    html = page(replace(run, measured=replace(run.measured, steps=steps, cpu=True)))
    read(html)
    assert (
        "5 steps of 5 were dealt for ranks of unequal speed (the slowest at 0.50): their makespans "
        "are those of equally fast ranks, for which other layouts would be shorter."
    ) in html
    assert 'id="speeds"' in html
    assert "that it ran alone" not in html


def test_a_report_without_comparison(waves: Report) -> None:
    html = page(replace(waves, compared=None))
    read(html)
    assert 'id="gains"' not in html


def test_a_step_without_a_best_single_degree(waves: Report) -> None:
    assert "or where none was looked for" not in page(waves)
    steps = tuple(replace(s, homogeneous_degree=0, homogeneous=0.0) for s in waves.steps)
    html = page(replace(waves, steps=steps))
    read(html)
    assert html.count("<td>-</td>") == len(steps)
    assert "- where none holds all samples, or where none was looked for" in html


def test_many_steps_are_drawn_by_the_mean_of_neighbours(waves: Report) -> None:
    first = waves.steps[0]
    steps = tuple(
        replace(first, step=n, makespan=first.makespan + n % 7, gap=0.01 * (n % 5))
        for n in range(1003)
    )
    html = page(replace(waves, steps=steps))
    read(html)
    assert len(html) < 1_000_000
    assert "steps 0 to 5, mean" in unescape(html)
    assert "largest gap: 4.00 %" in unescape(html)
    assert "The 40 steps with the longest makespans, of 1,003." in html


def layout(name: str, **changes: object) -> LayoutFigures:
    values: dict[str, object] = {
        "name": name,
        "recompute": "none",
        "degrees": (4,),
        "makespans": (2.0,),
        "gain": 1.5,
        "worst_gain": 1.25,
        "total_gain": 1.4,
        "padding": 0.125,
        "tokens_per_second": 1000.0,
        "shares": {"idle": 0.25},
    }
    return LayoutFigures(**{**values, **changes})  # type: ignore[arg-type]


def test_the_figures_come_first_in_plain_words(run: Report) -> None:
    compared = Compared(
        steps=(0, 1),
        costs="h100_7b",
        measured=False,
        difference=0.0,
        layouts=(layout("dynapar", shares={"idle": 0.01}), layout("static"), layout("padded")),
    )
    said = [" ".join(sentence) for sentence in in_short(replace(run, compared=compared))]
    assert said[0].startswith("5 steps of 24 samples and ")
    assert 'planned for 8 ranks (2 x 4), sync "step", capacity 4,096 tokens' in said[0]
    assert said[2] == (
        "1.50 times dynapar's makespan is what the best static degree (4) takes in the median "
        "step, 1.25 times in the step where switching gains least (over 2 of 5 steps)."
    )
    assert said[3].startswith("1.50 times dynapar's makespan is what padded, length-grouped ")
    assert "12.5 % of the tokens that they compute are padding" in said[3]
    assert said[4] == "1 % of the ranks' time is predicted to be idle (static: 25 %, padded: 25 %)."


def test_where_times_come_from_is_said(run: Report) -> None:
    assert pricing(run) == (
        'Times were predicted with costs "h100_7b": reference figures, measured nowhere; compare '
        "plans, not clocks."
    )
    assert run.compared is not None
    other = replace(run.compared, costs="mine", measured=True, difference=0.25)
    assert pricing(replace(run, compared=other)) == (
        'Times were predicted with costs "h100_7b"; what is compared here is priced with "mine": '
        "measured on the hardware that they are used for. These are not quite those of the plans, "
        "whose own makespans differ by up to 25 % from their price here."
    )


def test_the_page_is_the_same_each_time(run: Report, tmp_path: Path) -> None:
    assert page(run) == page(run)
