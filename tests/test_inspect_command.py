from __future__ import annotations

import json
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynapar.cluster import Cluster
from dynapar.costs import TICKS_PER_SECOND, EncoderCosts, coefficients, load_costs
from dynapar.errors import (
    ConfigError,
    CostsError,
    DynaparError,
    ModelError,
    SampleError,
    SourceError,
)
from dynapar.inspect_command import inspect_command, read_subject
from dynapar.inspection import Item, Subject, choose, degrees
from dynapar.packing.ticks import latency_ticks, sample_ticks, unit_ticks
from dynapar.rings import RingRules, allowed_degrees, narrowing
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, MediaTokens
from tests.data.small import noise, write_clip
from tests.test_architecture import heavy_after

VIDEO = {"kind": "video", "height": 720, "width": 1280, "frames": 600, "fps": 25}


def line(*media: object, text: int = 30) -> str:
    return json.dumps({"id": "a", "text_tokens": text, "media": media})


def report(capsys: pytest.CaptureFixture[str], target: str | Path, **more: object) -> dict:  # type: ignore[type-arg]
    settings: dict[str, object] = {"model": "qwen2.5-vl-7b", "json": True, **more}
    inspect_command(str(target), **settings)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_an_image_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise(480, 640).save(tmp_path / "a.png")
    found = report(capsys, tmp_path / "a.png")
    assert (found["llm_tokens"], found["text_tokens"]) == (393, 2)
    assert (found["encoder_tokens"], found["encoder_units"]) == (1564, 1)
    (medium,) = found["media"]
    assert (medium["size"], medium["grid"]) == ([476, 644], [1, 34, 46])
    assert found["degree"] == 1
    assert found["flops_total"] == sum(r["forward"] + r["backward"] for r in found["flops"])
    assert 0.2 < found["encoder_share"] < 0.4
    inspect_command(str(tmp_path / "a.png"), model="qwen2.5-vl-7b")
    text = capsys.readouterr().out
    for part in (
        "a.png, by qwen2.5-vl-7b: 393 LLM tokens (2 of text), 1,564 encoder tokens in 1 unit\n",
        "resized to 476 x 644 pixels (multiples of 28; 3,136 to 12,845,056 pixels",
        "34 x 46 patches of 14 pixels, 1 unit: 1,564 encoder tokens",
        "windows of 8 x 8 patches, over the whole unit in 4 of 32 layers",
        "merged 2 x 2: 391 LLM tokens",
        "Degree 1 at least: one rank holds it: 393 of 16,384 LLM tokens",
        "not measured",
    ):
        assert part in text


def test_a_video_and_a_sound_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_clip(tmp_path / "v.mp4", 24)
    found = report(capsys, tmp_path / "v.mp4", model="qwen3-vl-8b")
    assert (found["media"][0]["frames"], found["encoder_units"]) == (6, 3)
    with wave.open(str(tmp_path / "s.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.zeros(8000 * 5, np.int16).tobytes())
    found = report(capsys, tmp_path / "s.wav", model="qwen2.5-omni-7b")
    assert (found["llm_tokens"], found["encoder_tokens"]) == (127, 250)
    assert {row["part"] for row in found["flops"]} == {"audio", "merger", "llm"}


def test_a_metadata_line_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    image = {"kind": "image", "height": 480, "width": 640}
    found = report(capsys, line(image, VIDEO))
    assert found["text_tokens"] == 34
    assert found["llm_tokens"] == 34 + 391 + found["media"][1]["llm_tokens"]
    assert found["encoder_units"] == 1 + 24
    given = {"kind": "image", "llm_tokens": 512, "encoder_tokens": 2050}
    found = report(capsys, line({**given, "encoder_units": [1025, 1025]}))
    assert (found["llm_tokens"], found["encoder_units"]) == (542, 2)


def subject(tokens: int, *units: int) -> Subject:
    items = [Item("", MediaTokens(IMAGE_KIND, (0, 0), (1, 1, unit), 0, (), 0.0)) for unit in units]
    return Subject(id="x", text_tokens=tokens, items=tuple(items))


@pytest.mark.parametrize(
    ("tokens", "units", "degree", "why"),
    [
        (1000, (), 1, "one rank holds it: 1,000 of 1,000 LLM tokens"),
        (1001, (), 2, "at degree 1 a rank would hold 1,001 LLM tokens, capacity is 1,000"),
        (2001, (), 3, "at degree 2 a rank would hold 1,001 LLM tokens"),
        (10, (60, 60), 2, "at degree 1 a rank would hold 120 encoder tokens, capacity is 100"),
        (10, (101,), 0, "One encoder unit alone is too large"),
        (9000, (), 0, "at degree 8, the largest, a rank would hold 1,125 LLM tokens"),
    ],
)
def test_the_least_degree_that_holds_a_sample_and_why(
    tokens: int, units: tuple[int, ...], degree: int, why: str
) -> None:
    limits: dict[str, Any] = {"capacity": 1000, "encoder_capacity": 100}
    one, cluster = subject(tokens, *units), Cluster.parse("1x8")
    table = degrees(one, cluster=cluster, costs=load_costs(None), **limits)
    found, reason = choose(table, one, **limits)
    assert found == degree
    assert why in reason


@pytest.mark.parametrize(
    ("nodes", "rules"),
    [
        ("16x8", RingRules()),
        ("2x8", RingRules(max_degree=6)),
        ("2x8", RingRules(degrees="pow2")),
        ("2x8", RingRules(peer_budget=3)),
        ("16x8", RingRules(peer_budget=None)),
    ],
)
def test_degrees_are_those_that_the_planner_may_use(nodes: str, rules: RingRules) -> None:
    cluster = Cluster.parse(nodes)
    limits: dict[str, Any] = {"capacity": 100, "encoder_capacity": 100}
    one = subject(100 * cluster.ranks + 1)
    table = degrees(one, cluster=cluster, costs=load_costs(None), rings=rules, **limits)
    assert tuple(row.degree for row in table) == allowed_degrees(cluster, rules)
    if rules == RingRules():
        assert table == degrees(one, cluster=cluster, costs=load_costs(None), **limits)
    narrowed = narrowing(cluster, rules)
    largest = f"at degree {table[-1].degree}, the largest{f' ({narrowed})' * bool(narrowed)}, a"
    degree, why = choose(table, one, narrowed=narrowed, **limits)
    assert degree == 0
    assert largest in why


def test_rules_reach_the_report_and_the_planned_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Among samples that fit the largest degree that the rules leave, not the whole cluster."""
    more = {"cluster": "16x8", "capacity": 1000, "among": "longdoc", "global_batch": 8}
    found = report(capsys, line(text=1500), **more)
    assert [row["degree"] for row in found["degrees"]][-1] == 64
    assert found["step"]["samples"] == 8
    found = report(capsys, line(text=1500), rings=RingRules(max_degree=2), **more)
    assert [row["degree"] for row in found["degrees"]] == [1, 2]
    assert found["step"]["degree"] == 2


def test_times_are_those_of_the_planner() -> None:
    costs, cluster = load_costs(None), Cluster.parse("2x4")
    constants = coefficients(costs, ranks_per_node=4)
    one = subject(5000, 700, 300)
    table = degrees(one, cluster=cluster, costs=costs, capacity=9999, encoder_capacity=9999)
    assert [row.degree for row in table] == [1, 2, 3, 4, 6, 8]
    for row in table:
        encoder = [int(unit_ticks(unit, constants)) for unit in (700, 300)]
        ticks = sum(sample_ticks(5000, row.degree, constants)) + constants.linear_rank
        ticks += max(encoder) if row.degree > 1 else sum(encoder)
        ticks += latency_ticks(row.degree, constants)
        assert row.seconds == ticks / TICKS_PER_SECOND


def test_a_clip_is_priced_as_audio() -> None:
    costs, cluster = load_costs(None), Cluster.parse("1x1")
    heard = replace(costs, audio=EncoderCosts(parameters=1e9, flops=1e13))
    limits: dict[str, Any] = {"capacity": 9999, "encoder_capacity": 9999}
    clip = Item("", MediaTokens(AUDIO_KIND, (0, 0), (1, 1, 1000), 0, (), 0.0))
    alone = Subject(id="x", text_tokens=9, items=(clip,))
    both = Subject(id="x", text_tokens=9, items=(clip, *subject(9, 300).items))
    (priced,), (mixed,) = (
        degrees(one, cluster=cluster, costs=heard, **limits) for one in (alone, both)
    )
    (without,) = degrees(subject(9), cluster=cluster, costs=heard, **limits)
    assert priced.seconds - without.seconds == pytest.approx(6 * 1e9 * 1000 / 1e13)
    image = unit_ticks(300, coefficients(costs, ranks_per_node=1)) / TICKS_PER_SECOND
    assert mixed.seconds - priced.seconds == pytest.approx(image)
    (as_image,) = degrees(alone, cluster=cluster, costs=costs, **limits)
    (image_itself,) = degrees(subject(9, 1000), cluster=cluster, costs=costs, **limits)
    assert as_image == image_itself


def test_a_step_is_planned_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, line(VIDEO), among="flat", global_batch=16, capacity=4096)
    step = found["step"]
    assert found["degree"] > 1
    assert step["degree"] >= found["degree"]
    assert step["microbatch_ranks"] >= step["degree"]
    assert 0 < step["share"] <= 1


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"kind": "image", "height": 5}, "has width None; expected a whole number, 1 or more"),
        (
            {"kind": "image", "height": 0, "width": 5},
            "has height 0; expected a whole number, 1 or more",
        ),
        (
            {"kind": "video", "height": 5, "width": 5, "frames": 5},
            "has fps None; expected a number above 0",
        ),
        ({"kind": "audio"}, "has seconds None; expected a number above 0"),
    ],
)
def test_media_without_size_are_named_in_a_line(item: dict[str, object], said: str) -> None:
    with pytest.raises(SampleError, match=rf"^the metadata line, media\[0\] {said}$"):
        inspect_command(line(item), model="qwen2.5-omni-7b")


def test_costs_of_another_version_are_named_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"version": 3}')
    with pytest.raises(CostsError, match=r"^costs '.*c\.json' has version 3; expected 1: [^\n]*$"):
        inspect_command(line(), model="qwen2.5-vl-7b", costs=tmp_path / "c.json")


def test_frozen_parts_have_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    image = {"kind": "image", "height": 480, "width": 640}
    found = report(capsys, line(image), frozen=["vision"])
    backward = {(r["part"], r["backward"] > 0) for r in found["flops"]}
    assert backward == {("vision", False), ("merger", True), ("llm", True)}


@pytest.mark.parametrize(
    ("target", "more", "kind", "said"),
    [
        ("none.png", {}, SourceError, "'none.png' is no file"),
        (line({"kind": "image", "width": 5}), {}, SampleError, r"media\[0\] has height None"),
        (line({"kind": "audio"}), {}, SampleError, r"media\[0\] has seconds None"),
        (
            line({"kind": "audio", "seconds": 2}),
            {},
            SampleError,
            r"media\[0\]: model 'qwen2\.5-vl-7b' takes no audio",
        ),
        (line(), {"model": "qwen2.5-vl-9b"}, ModelError, "did you mean 'qwen2.5-vl-7b'"),
        (line(), {"frozen": ["tower"]}, ConfigError, "frozen is 'tower'; expected some of vision"),
    ],
)
def test_what_is_wrong_is_named(
    target: str, more: dict[str, object], kind: type[DynaparError], said: str
) -> None:
    settings: dict[str, object] = {"model": "qwen2.5-vl-7b", **more}
    with pytest.raises(kind, match=said):
        inspect_command(target, **settings)  # type: ignore[arg-type]


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    from dynapar.catalog import load_model_shape

    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(SourceError, match="is of no known kind"):
        read_subject(str(tmp_path / "a.xyz"), load_model_shape("qwen2.5-vl-7b"), None)


def test_inspecting_loads_no_torch(tmp_path: Path) -> None:
    noise(48, 64).save(tmp_path / "a.png")
    code = (
        "from dynapar.inspect_command import inspect_command\n"
        f"inspect_command({str(tmp_path / 'a.png')!r}, model='qwen2.5-vl-7b')"
    )
    assert heavy_after(code) == []
