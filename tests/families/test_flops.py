from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynapar.catalog import load_model_shape
from dynapar.flops import (
    PARTS,
    Lora,
    Matrix,
    Part,
    Tuning,
    Work,
    audio_segments,
    encoder_segments,
    linear_parameters,
    sample_work,
    training_flops,
)
from dynapar.shapes import AudioShape, ModelShape, TextShape
from tests.families.small_models import CASES, Case, counted

MLLAMA_MASK = 0.003
"""transformers multiplies the mask of Llama 3.2 Vision with itself, which is no module's work."""


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return CASES[request.param]()


def test_forward_flops_are_those_of_the_counter_module_by_module(case: Case) -> None:
    work = sample_work(case.shape, case.tokens, case.media, square=True)
    ours: dict[tuple[str, str], int] = {(r.part, r.module): r.forward for r in work}
    theirs = counted(case)
    everything = theirs.pop(("", "all"))
    assert ours.keys() == theirs.keys()
    for key, count in theirs.items():
        assert ours[key] == pytest.approx(count, rel=0.001), key
    assert sum(ours.values()) == pytest.approx(everything, rel=MLLAMA_MASK)


def test_backward_flops_are_those_of_the_counter(case: Case) -> None:
    work = sample_work(case.shape, case.tokens, case.media, square=True)
    ours = sum(row.forward + row.backward for row in training_flops(work))
    theirs = counted(case, backward=True)["", "all"]
    assert ours == pytest.approx(theirs, rel=MLLAMA_MASK)


PLACES: dict[str, tuple[str, ...]] = {
    "merger": ("merger", "multi_modal_projector"),
    "vision": ("visual", "vision_tower"),
}


def freeze(model: nn.Module, tuning: dict[Part, Tuning]) -> None:
    for name, parameter in model.named_parameters():
        part = next(
            (part for part, words in PLACES.items() if any(word in name for word in words)), "llm"
        )
        if tuning.get(part) == "frozen":  # type: ignore[call-overload]
            parameter.requires_grad_(False)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
@pytest.mark.parametrize(
    "frozen", [("vision",), ("vision", "llm"), ("vision", "merger"), ("merger", "llm"), ("llm",)]
)
def test_frozen_parts_cost_what_the_counter_says(name: str, frozen: tuple[Part, ...]) -> None:
    case = CASES[name]()
    tuning: dict[Part, Tuning] = dict.fromkeys(frozen, "frozen")
    freeze(case.model, tuning)
    work = sample_work(case.shape, case.tokens, case.media, square=True)
    ours = sum(row.forward + row.backward for row in training_flops(work, tuning))
    assert ours == pytest.approx(counted(case, backward=True)["", "all"], rel=0.001)


class Adapted(nn.Module):
    """A frozen matrix beside two trained ones."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("modules", [("attention", "mlp"), ("attention",)])
def test_lora_costs_what_the_counter_says(modules: tuple[str, ...]) -> None:
    case = CASES["qwen3"]()
    case.model.requires_grad_(False)
    for layer in case.model.model.layers:
        for name, block in (("attention", layer.self_attn), ("mlp", layer.mlp)):
            if name in modules:
                for child, module in list(block.named_children()):
                    if isinstance(module, nn.Linear):
                        setattr(block, child, Adapted(module, 4))
    case.model.enable_input_require_grads()
    lora = Lora(rank=4, modules=modules)  # type: ignore[arg-type]
    work = sample_work(case.shape, case.tokens, case.media, square=True)
    ours = sum(row.forward + row.backward for row in training_flops(work, {"llm": lora}))
    assert ours == pytest.approx(counted(case, backward=True)["", "all"], rel=0.001)


def test_nothing_is_passed_back_when_all_is_frozen() -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    work = sample_work(shape, 400, [shape.image(480, 640)])
    rows = training_flops(work, dict.fromkeys(PARTS, "frozen"))
    assert [row.backward for row in rows] == [0] * len(rows)
    assert sum(row.forward for row in rows) == sum(row.forward for row in work)


def seen_pairs(text: TextShape, tokens: int, spans: list[range], *, windowed: bool) -> int:
    """Pairs that a mask lets through, counted one by one."""
    pairs = 0
    for q in range(tokens):
        for k in range(tokens):
            past = k <= q
            if windowed and text.chunked:
                past = past and q // text.window == k // text.window
            elif windowed:
                past = past and q - k < text.window
            together = text.two_way_media and any(q in span and k in span for span in spans)
            pairs += past or together
    return pairs


@pytest.mark.parametrize(
    ("window", "chunked", "two_way"),
    [(0, False, False), (16, False, False), (16, True, False), (0, False, True)],
)
@pytest.mark.parametrize("tokens", [9, 16, 61, 200])
def test_scores_are_those_that_the_mask_lets_through(
    window: int, chunked: bool, two_way: bool, tokens: int
) -> None:
    text = TextShape(
        layers=3,
        width=8,
        heads=2,
        kv_heads=1,
        head_width=4,
        mlp_width=8,
        vocabulary=10,
        tied=False,
        window=window,
        window_layers=2 if window else 0,
        chunked=chunked,
        two_way_media=two_way,
    )
    model = load_model_shape("gemma-3-4b")
    item = model.image(100, 100)._replace(llm_tokens=7, boundary_tokens=0)
    shape = ModelShape(name="x", family=model.family, text=text, vision=model.vision)
    work = {row[:2]: row for row in sample_work(shape, tokens, [item])}
    spans = [range(1, 8)]
    layers = [bool(window)] * text.window_layers
    layers += [False] * (text.layers - text.window_layers)
    pairs = sum(seen_pairs(text, tokens, spans, windowed=windowed) for windowed in layers)
    # Half a token a row: the diagonal is counted as half.
    slack = text.layers * tokens
    assert abs(work["llm", "attention"].scores / (4 * 8) - pairs) <= slack


@pytest.mark.parametrize(
    ("size", "windows", "squares"),
    [((480, 640), 30, 92560), ((1080, 1920), 180, 668304), ((2200, 1700), 320, 1206928)],
)
def test_windows_of_qwen25_are_those_of_the_catalog(
    size: tuple[int, int], windows: int, squares: int
) -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    item = shape.image(*size)
    whole, cut = encoder_segments(shape.vision, item)
    assert (len(cut), sum(n * n for n in cut)) == (windows, squares)
    assert whole == (item.unit_tokens,)
    assert sum(cut) == item.unit_tokens
    assert squares == pytest.approx(64 * item.unit_tokens, rel=0.08)


def test_audio_attends_in_windows_of_100_positions() -> None:
    shape = load_model_shape("qwen2.5-omni-7b")
    item = shape.audio(7.3)
    assert isinstance(shape.audio_encoder, AudioShape)
    assert audio_segments(shape.audio_encoder, item) == (100, 100, 100, 65)
    assert item.unit_tokens == 365


REFERENCE = [
    ("qwen2.5-7b", 13.0506, (3354.1, 13251.3, 120379.3)),
    ("qwen3-8b", 13.8915, (3575.6, 14186.4, 133590.7)),
    ("qwen2.5-72b", 140.4253, (36034.8, 141736.0, 1238325.0)),
    ("mistral-nemo-12b", 21.8104, (5604.9, 22138.1, 200660.9)),
]


@pytest.mark.parametrize(("name", "linear", "totals"), REFERENCE)
def test_text_flops_are_those_of_the_catalog(
    name: str, linear: float, totals: tuple[float, ...]
) -> None:
    shape = load_model_shape(name)
    assert linear_parameters(shape.text) * 2 / 1e9 == pytest.approx(linear, abs=6e-5)
    for tokens, total in zip((256, 1000, 8192), totals, strict=True):
        work = sample_work(shape, tokens, head_rows=0)
        assert sum(row.forward for row in work) / 1e9 == pytest.approx(total, abs=0.06)


def test_gemma_counts_its_windows() -> None:
    shape = load_model_shape("gemma-3-12b")
    (attention,) = (r for r in sample_work(shape, 1000, head_rows=0) if r.module == "attention")
    assert attention.scores == 2 * 48 * 1000**2 * 4096
    (attention,) = (r for r in sample_work(shape, 8192, head_rows=0) if r.module == "attention")
    seen = 8 * 8192**2 / 2 + 40 * (1024 * 8192 - 1024**2 / 2)
    assert attention.scores == 4 * seen * 4096


ENCODERS = [
    ("qwen2.5-vl-7b", (480, 640), 2035, 0.032),
    ("qwen2.5-vl-7b", (2200, 1700), 32073, 0.243),
    ("qwen3-vl-8b", (480, 640), 1166, 0.154),
    ("qwen3-vl-8b", (1080, 1920), 14993, 0.553),
    ("qwen3-vl-8b", (2200, 1700), 38649, 0.689),
    ("internvl3-8b", (480, 640), 9391, 0.143),
    ("internvl3-8b", (1080, 1920), 6501, 0.143),
    ("internvl3-78b", (1080, 1920), 107468, 0.051),
    ("gemma-3-12b", (480, 640), 5455, 0.383),
    ("pixtral-12b", (1080, 1920), 2377, 0.220),
    ("pixtral-12b", (2200, 1700), 3584, 0.281),
]


@pytest.mark.parametrize(("name", "size", "giga", "share"), ENCODERS)
def test_encoder_flops_are_those_of_the_catalog(
    name: str, size: tuple[int, int], giga: int, share: float
) -> None:
    shape = load_model_shape(name)
    item = shape.image(*size)
    rows = [
        row
        for row in sample_work(shape, item.llm_tokens, [item])
        if row.part == "vision" and row.module != "patch_embedding"
    ]
    total = sum(row.forward for row in rows)
    # The table has windows of 64 tokens throughout; cut ones cost up to 0.06 % less.
    assert total / 1e9 == pytest.approx(giga, rel=0.0007, abs=0.5)
    assert sum(row.scores for row in rows) / total == pytest.approx(share, abs=0.0012)


def test_experts_that_a_token_does_not_pass_cost_nothing() -> None:
    few, many = (load_model_shape(f"llama-4-{name}").text for name in ("scout", "maverick"))
    assert (few.experts, few.expert_layers, many.experts, many.expert_layers) == (16, 48, 128, 24)
    rows = sample_work(load_model_shape("qwen3-30b-a3b"), 10, head_rows=0)
    (mlp,) = (row for row in rows if row.module == "mlp")
    assert mlp.forward == 48 * 2 * 10 * 2048 * (3 * 8 * 768 + 128)


def test_a_matrix_counts_two_flops_a_weight_and_row() -> None:
    assert Matrix(3, 5, 7, 2).flops == 2 * 2 * 3 * 5 * 7
    assert Work("llm", "mlp", (Matrix(1, 1, 1), Matrix(2, 1, 1)), 5).forward == 2 + 4 + 5
