"""The memory model is near what real layers hold, under every policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dynapar.bench.live_bytes import LiveBytes
from dynapar.bench.memory import Case, measure, text_model, vision_model


@pytest.fixture
def alone() -> Iterator[None]:
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_nobody_holds_counts_no_more() -> None:
    kept = torch.zeros(1000)
    live = LiveBytes()
    live.hold([kept, kept[:10]])
    with live:
        one = kept + 1
        two = one.view(10, 100)  # the same storage
        del one
        assert live.live == 8000
        three = two * 2
        del two
    assert (live.live, live.peak) == (8000, 12000)
    live.reset()
    del three
    assert (live.live, live.peak) == (4000, 8000)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen2.5-vl"])
def test_predicted_peaks_are_those_of_the_layers(kind: str, low: bool, alone: None) -> None:
    if kind == "qwen2.5-vl":
        model = vision_model(layers=3, blocks=5)
        case = Case(name="", model=model, tokens=400, sides=(24, 16), low_precision=low, chunk=64)
    elif kind == "llama":
        model = text_model("llama", layers=3, vocabulary=4096)
        case = Case(name="", model=model, tokens=500, low_precision=low, chunk=256)
    else:
        model = text_model(layers=5, width=384, mlp=640)
        case = Case(name="", model=model, tokens=700, low_precision=low, chunk=64)
    found = list(measure(case))
    assert [peak.policy for peak in found] == ["none", "selective", "full", "offload"]
    for peak in found:
        assert abs(peak.error) < 0.03, peak
        assert abs(peak.activations_error) < 0.06, peak
    # And each policy does save something, or the errors would say little.
    assert [peak.measured for peak in found] == sorted({p.measured for p in found}, reverse=True)
