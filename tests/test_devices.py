from __future__ import annotations

import pytest

from dynapar.catalog import load_model_shape
from dynapar.costs import costs_from_json, costs_to_json, load_costs
from dynapar.devices import DEVICES, costs_for, total_parameters
from dynapar.errors import CostsError
from dynapar.families.presets import RELEASED
from dynapar.flops import sample_work


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-405b", 405.8),
        ("qwen2.5-0.5b", 0.494),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("gpt-oss-120b", 116.8),
        ("gemma-2-9b", 9.24),
        ("llama-3.2-11b-vision", 9.78),
    ],
)
def test_parameters_are_those_that_model_cards_state(name: str, billions: float) -> None:
    """Of the language model; the 11B model has 0.9B more in its encoder."""
    found = total_parameters(load_model_shape(name).text)
    assert found / 1e9 == pytest.approx(billions, rel=0.003)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RELEASED)
def test_every_model_has_costs_on_every_device(name: str, device: str) -> None:
    costs = costs_for(load_model_shape(name), device)
    assert (costs.name, costs.measured) == (f"{name}@{device}", False)
    assert costs_from_json(costs_to_json(costs)) == costs


def test_a_7b_model_on_an_h100_is_near_the_reference() -> None:
    costs, reference = costs_for(load_model_shape("internvl3-8b"), "H100"), load_costs(None)
    for one, other in (
        (costs.linear.parameters, reference.linear.parameters),
        (costs.linear.flops, reference.linear.flops),
        (costs.attention.flops, reference.attention.flops),
        (costs.encoder.flops, reference.encoder.flops),
        (costs.encoder.parameters, reference.encoder.parameters),
        (costs.exchange.bytes_per_s_in_node, reference.exchange.bytes_per_s_in_node),
        (costs.fixed.microbatch, reference.fixed.microbatch),
    ):
        assert one == pytest.approx(other, rel=0.05)
    assert costs.attention.layers == 28
    assert costs.attention.hidden == 3584
    assert costs.exchange.kv_bytes_per_token == 2048
    assert (costs.encoder.layers, costs.encoder.hidden) == (24, 1024)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "internvl3-8b", "pixtral-12b", "gemma-3-4b"])
@pytest.mark.parametrize("side", [1024, 2000])
def test_an_image_costs_the_encoder_its_flops(name: str, side: int) -> None:
    """Three times the forward FLOPs of matrices, 3.5 times those of scores, at the stated rate."""
    shape = load_model_shape(name)
    encoder = costs_for(shape, "A100").encoder
    image = shape.image(side, side)
    work = [
        row
        for row in sample_work(shape, image.llm_tokens, [image], head_rows=0)
        if row.part != "llm"
    ]
    expected = sum(3 * row.linear + 3.5 * row.scores for row in work) / (312e12 * 0.22)
    unit = image.unit_tokens
    each = 6 * encoder.parameters * unit + 14 * encoder.layers * encoder.hidden * unit**2
    assert image.units * each / encoder.flops == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("name", ["qwen3-8b", "mistral-7b", "gpt-oss-20b", "gemma-2-2b"])
def test_a_long_text_costs_its_flops(name: str) -> None:
    shape = load_model_shape(name)
    costs = costs_for(shape, "A100")
    tokens = 30_000
    work = sample_work(shape, tokens, head_rows=0)
    expected = sum(3 * row.linear for row in work) / (312e12 * 0.40)
    expected += sum(3.5 * row.scores for row in work) / (312e12 * 0.30)
    linear, attention = costs.linear, costs.attention
    found = 6 * linear.parameters * tokens / linear.flops
    found += 7 * attention.layers * attention.hidden * tokens**2 / attention.flops
    assert found == pytest.approx(expected, rel=0.03)


def test_layers_of_cross_attention_cost_what_a_hand_counts() -> None:
    """Llama 3.2 11B: 32 layers of text, 8 that attend to the 4 x 1601 keys of an image."""
    text = load_model_shape("llama-3.2-11b-vision")
    costs = costs_for(text, "H100")
    own, shared, mlp = 4096 * 4096, 4096 * 1024, 3 * 4096 * 14336
    layer, cross = 2 * own + 2 * shared + mlp, 2 * own + mlp
    # Scores: 3.5 times 2 x 2 FLOPs for each key and number of a query, at 0.30 of the peak;
    # weights: 6 FLOPs at 0.40.
    scores = 3.5 * 4 * 6404 * 4096 * 8 / 0.30 * 0.40 / 6
    assert costs.linear.parameters == pytest.approx(32 * layer + 8 * cross + scores, rel=1e-12)
    assert scores / 8 / cross == pytest.approx(0.389, abs=0.001)
    assert (costs.attention.layers, costs.exchange.layers) == (32, 32)
    # 40 layers over 6432 tokens of 4 slots, of which 6404 become keys and 6400 are patches.
    encoder = 40 * (4 * 1280**2 + 2 * 1280 * 5120) + 3 * 14 * 14 * 1280 * 6400 / 6432
    keys = (7680 * 4096 + 8 * 2 * shared * 0.22 / 0.40) * 6404 / 6432
    assert costs.encoder.parameters == pytest.approx(encoder + keys, rel=1e-12)


def test_audio_costs_what_a_hand_counts() -> None:
    """Qwen2.5-Omni: 30 s are 3000 mel frames, 1500 tokens in windows of 100, 750 LLM tokens."""
    costs = costs_for(load_model_shape("qwen2.5-omni-7b"), "H100")
    assert costs.audio is not None
    layers = 32 * (4 * 1280**2 + 2 * 1280 * 5120)
    convolutions = 2 * 3 * 128 * 1280 + 3 * 1280 * 1280
    scores = 3.5 / 6 * 4 * 100 * 1280 * 32
    merger = 1280 * 3584 / 2
    assert costs.audio.parameters == pytest.approx(layers + convolutions + scores + merger)
    assert (costs.audio.layers, costs.audio.flops) == (0, 989e12 * 0.22)
    seen = costs_for(load_model_shape("qwen2.5-vl-7b"), "H100")
    assert seen.audio is None
    more = 2 * 3 * (layers + 3 * 1280 * (128 + 1280) + 1280 * 3584)
    assert costs.sharded.encoder_bytes - seen.sharded.encoder_bytes == more


def test_devices_go_by_name_and_an_unknown_one_is_named() -> None:
    shape = load_model_shape("qwen2.5-7b")
    assert costs_for(shape, "h200").name == "qwen2.5-7b@H200"
    with pytest.raises(CostsError, match=r"'H10' is unknown; expected one of A100, H100, H200; di"):
        costs_for(shape, "H10")
