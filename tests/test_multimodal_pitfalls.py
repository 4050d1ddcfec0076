"""The multimodal group of known failures, as far as it is about counting: one test a row (MM1 ..).

Each on the row's small input. MM2 to MM4 and MM8 are about running: `tests/runtime` has them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dynapar.attention.shards import cut, cut_tokens, index
from dynapar.catalog import ModelShape, load_model_shape
from dynapar.cluster import Cluster
from dynapar.costs import load_costs
from dynapar.data.chat import ChatTokenizer
from dynapar.data.positions import mrope_positions
from dynapar.data.records import MediaFile, parse_conversation
from dynapar.data.rendered import Rendered
from dynapar.errors import PlanError
from dynapar.inspect_command import inspect_command
from dynapar.meta import SampleTable, read_metadata_jsonl
from dynapar.plan import StepPlan
from dynapar.planner import PlannerConfig, plan_step
from dynapar.shapes import MediaTokens
from tests.data.folders import write_family


def rendered(shape: ModelShape, items: list[MediaTokens], text: str = "Hi") -> Rendered:
    sample = {
        "messages": [
            {"role": "user", "content": "<image>" * len(items) + text},
            {"role": "assistant", "content": "yes"},
        ],
        "images": ["x"] * len(items),
    }
    record = parse_conversation(
        sample,
        default_id="a",
        place="here",
        find=lambda kind, field, name: MediaFile(kind, name, Path(name), 0, -1),
    )
    return ChatTokenizer(shape).render(record, items)


@pytest.fixture
def qwen(tmp_path: Path) -> ModelShape:
    return load_model_shape(str(write_family(tmp_path / "model", "qwen2.5-vl-3b")))


def planned(
    samples: SampleTable, cluster: str, capacity: int, encoder_capacity: int = 65_536
) -> StepPlan:
    config = PlannerConfig(capacity=capacity, encoder_capacity=encoder_capacity)
    shape = Cluster.parse(cluster)
    return plan_step(samples, step=0, cluster=shape, costs=load_costs(None), config=config)


def metadata(folder: Path, *lines: object, model: str = "qwen2.5-vl-7b") -> SampleTable:
    path = folder / "m.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_metadata_jsonl(path, load_model_shape(model))


def test_mm1_placeholders_cut_over_ranks_are_as_many_as_their_features(qwen: ModelShape) -> None:
    """An image of 6,175 tokens at degree 2: each feature has one owner, wherever the cut falls."""
    item = qwen.image(95 * 28, 65 * 28)
    assert item.llm_tokens == 6175
    sample = rendered(qwen, [item])
    lengths = [len(sample.ids)]
    spans = cut(lengths, degree=2)
    places = [index(spans, lengths, position) for position in range(2)]
    local = [int((sample.kinds[place] == 1).sum()) for place in places]
    assert sum(local) == 6175
    assert min(local) > 2000
    assert sorted(np.concatenate(places).tolist()) == list(range(lengths[0]))


@pytest.mark.parametrize("tokens", [4093, 4096, 4099])
def test_mm5_positions_are_cut_like_ids_at_any_length(qwen: ModelShape, tokens: int) -> None:
    """A cut-off that is no multiple of 8: all columns have the sample's very length."""
    item = qwen.image(28 * 60, 28 * 60)
    text = "a" * (tokens - len(rendered(qwen, [item], "").ids))
    sample = rendered(qwen, [item], text)
    positions = mrope_positions(sample.kinds, [item], qwen.vision)
    assert (len(sample.ids), positions.shape) == (tokens, (3, tokens))
    spans = cut([tokens], degree=2)
    for position, share in enumerate(cut_tokens(tokens, 2)):
        place = index(spans, [tokens], position)
        assert len(sample.ids[place]) == positions[:, place].shape[1] == share


def test_mm6_equal_token_counts_differ_in_encoder_tokens_and_time(tmp_path: Path) -> None:
    """4,000 tokens of text, and 4,000 of which 3,900 and more are an image's."""
    image = {"kind": "image", "height": 28 * 60, "width": 28 * 65}
    samples = metadata(
        tmp_path,
        {"id": "A", "text_tokens": 4002},
        {"id": "B", "text_tokens": 100, "media": [image]},
    )
    assert samples.llm_tokens.tolist() == [4002, 4002]
    assert samples.encoder_tokens.tolist() == [0, 4 * 3900]
    seconds = {}
    for row, name in enumerate("AB"):
        plan = planned(samples.take(np.array([row])), "1x1", 8192)
        (microbatch,) = plan.microbatches
        seconds[name] = (plan.makespan, microbatch.parts.encoder)
    assert seconds["A"][1] == 0
    assert seconds["B"][0] - seconds["A"][0] == seconds["B"][1] > 0.2 * seconds["A"][0]


def test_mm7_no_run_of_placeholders_is_cut_short(qwen: ModelShape) -> None:
    """A capacity inside the image's run: the sample is shared, or refused by name; never cut."""
    item = qwen.image(28 * 40, 28 * 50)
    sample = rendered(qwen, [item])
    runs = np.flatnonzero(sample.kinds)
    assert len(runs) == item.llm_tokens == runs[-1] - runs[0] + 1
    capacity = int(runs[0]) + item.llm_tokens // 2
    table = SampleTable(
        ids=("long",),
        llm_tokens=np.array([len(sample.ids)]),
        text_tokens=np.array([len(sample.ids) - item.llm_tokens]),
        label_tokens=np.array([sample.label_tokens]),
        modalities=np.array([1], np.uint8),
        unit_offsets=np.array([0, 1]),
        unit_tokens=np.array([item.unit_tokens]),
    )
    (microbatch,) = planned(table, "1x4", capacity).microbatches
    assert len(microbatch.ranks) > 1
    assert sum(microbatch.tokens_per_rank) == len(sample.ids)
    with pytest.raises(PlanError, match="'long'"):
        planned(table, "1x1", capacity)


def test_mm9_one_clip_is_explained_from_the_users_own_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """768 frames of 360 x 640 are 384, 10,752 or 46,080 tokens."""
    counts = {}
    for name, rules in {
        "plain": {},
        "capped": {"cap_pixels_per_frame": True},
        "released": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
    }.items():
        folder = write_family(tmp_path / name, "qwen3-vl-2b")
        (folder / "preprocessor_config.json").write_text("{}")
        (folder / "video_preprocessor_config.json").write_text(json.dumps(rules))
        clip = {"kind": "video", "height": 360, "width": 640, "frames": 768, "fps": 2}
        line = json.dumps({"id": "a", "text_tokens": 30, "media": [clip]})
        inspect_command(line, model=str(folder), json=True)
        (item,) = json.loads(capsys.readouterr().out)["media"]
        counts[name] = item["llm_tokens"]
        assert any("as the processor is set" in step for step in item["steps"])
    assert counts == {"plain": 384, "capped": 46080, "released": 10752}


def test_mm10_each_image_is_encoded_once(tmp_path: Path) -> None:
    """16 images on 8 ranks: spread by patches, and none of them twice."""
    images = [{"kind": "image", "height": 28 * (20 + n), "width": 28 * 30} for n in range(16)]
    samples = metadata(tmp_path, {"id": "a", "text_tokens": 500, "media": images})
    units = samples.units(0)
    (microbatch,) = planned(samples, "1x8", 4096).microbatches
    (placed,) = microbatch.placements
    assert len(microbatch.ranks) > 1
    assert len(placed.encoders) == len(units) == 16
    assert sum(microbatch.encoder_tokens_per_rank) == units.sum()
    share = units.sum() / len(microbatch.ranks)
    assert max(microbatch.encoder_tokens_per_rank) <= share + units.max()
