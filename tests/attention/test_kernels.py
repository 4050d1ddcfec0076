import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dynapar.attention import kernels_cuda, staged
from dynapar.attention.bands import Bands, causal, full, prefix, spans, window
from dynapar.attention.calls import Kernel, Request
from dynapar.attention.kernels import KERNELS, KernelError, choose
from dynapar.attention.plan import plan_attention
from dynapar.attention.tiles import Tile
from tests.attention import fake_flash
from tests.attention.fake_cuda_ops import SCHEMAS, FakeOps
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS, dense_attention, dense_mask

LENGTHS = (64, 1, 33, 20, 2)
BANDS: tuple[Bands, ...] = (
    causal(64),
    causal(1),
    full(33),
    window(20, width=6),
    prefix(2, tokens=2),
)


def request(**changes: object) -> Request:
    return Request(**({"device": "cpu", "dtype": torch.float32, "head_dim": 16} | changes))  # type: ignore[arg-type]


def ring_error(
    kernel: Kernel, degree: int, softcap: float | None, bands: Sequence[Bands] = BANDS
) -> float:
    """The worst error of output and gradients, in float32 against float64, relative."""
    lengths = [max(band.q1 for band in mask) for mask in bands]
    rng = torch.Generator().manual_seed(3)
    shapes = [(sum(lengths), heads, 16) for heads in (6, 2, 2, 6)]
    *whole, grad = [torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]
    leaves = [x.clone().requires_grad_() for x in whole]
    mask = dense_mask(lengths, bands)
    out = dense_attention(*leaves, mask=mask, scale=0.3, softcap=softcap)
    want = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    plan = plan_attention(lengths, degree=degree, bands=bands)

    def rank(transport: LoopbackTransport) -> float:
        bound = plan.bind(ranks=list(range(degree)), transport=transport)
        index = torch.from_numpy(plan.index(bound.position))
        q, k, v, dout = (x[index].float() for x in (*whole, grad))
        setting = staged.Setting(plan=bound, kernel=kernel, scale=0.3, softcap=softcap)
        out, lse = staged.forward(q, k, v, None, setting)
        got = (out, *staged.backward(dout, q, k, v, None, out, lse, setting)[:3])
        pairs: list[tuple[Tensor, Tensor]] = list(zip(got, want, strict=True))
        return max(float((a - b[index]).abs().max() / b.abs().max()) for a, b in pairs)

    return max(run_loopback(degree, rank))


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("name", ["cpu_flash", "math"])
def test_kernel_equals_dense_attention(name: str, degree: int) -> None:
    assert ring_error(KERNELS[name], degree, None) < 5e-6


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_sequences_share_calls_of_the_cpu_op(degree: int) -> None:
    lengths = [1, 9, 300, 9, 270, 2, 45, 1, 300, 9, 9]
    bands = [full(n) if n == 2 else causal(n) for n in lengths]
    assert ring_error(KERNELS["cpu_flash"], degree, None, bands) < 5e-6


def calls_of_the_cpu_op(tiles: Sequence[Tile]) -> list[tuple[tuple[int, ...], type]]:
    """Segments of each call, and how it takes its query rows."""
    calls = KERNELS["cpu_flash"].calls(tiles)
    return [(call.queries, type(call.q_rows)) for call in calls]


def test_tiles_that_touch_share_a_call_of_the_cpu_op() -> None:
    lengths = [1, 9, 300, 9, 2, 9, 9]
    bands = [full(n) if n == 2 else causal(n) for n in lengths]
    tiles = plan_attention(lengths, degree=1, bands=bands).prepare(0).tiles[0]
    assert calls_of_the_cpu_op(tiles) == [((1, 9, 300, 9), slice), ((2,), slice), ((9, 9), slice)]


def test_only_short_tiles_are_copied_to_share_a_call_of_the_cpu_op() -> None:
    tiles = [square(0, 20), square(30, 20), square(60, 300), square(400, 20), square(420, 300)]
    tiles.append(Tile(720, 300, 900, 300, 0, 299))  # Its keys do not follow.
    assert calls_of_the_cpu_op(tiles) == [
        ((20, 20), Tensor),
        ((300,), slice),
        ((20, 300), slice),
        ((300,), slice),
    ]


def test_long_tiles_on_the_keys_of_others_are_merged_without_being_joined() -> None:
    wide = [Tile(row, 300, row // 2, 150, -149, 299) for row in (0, 300)]
    assert calls_of_the_cpu_op(wide) == [((300,), slice), ((300,), slice)]
    assert calls_of_the_cpu_op([square(0, 300), square(300, 300)]) == [((300, 300), slice)]


def test_tiles_that_share_queries_share_no_call_of_the_cpu_op() -> None:
    tiles = [Tile(0, 5, 0, 4, -3, 4), Tile(0, 5, 8, 4, -3, 4), Tile(5, 5, 12, 3, -2, 4)]
    calls = KERNELS["cpu_flash"].calls(tiles)
    assert [(call.queries, call.keys) for call in calls] == [((5,), (4,)), ((5, 5), (4, 3))]


def square(row: int, tokens: int) -> Tile:
    """A causal tile of a sequence that starts at a row."""
    return Tile(row, tokens, row, tokens, 0, tokens - 1)


@pytest.mark.parametrize("degree", [1, 3])
def test_softcap_is_exact_on_the_math_kernel(degree: int) -> None:
    assert ring_error(KERNELS["math"], degree, 1.5) < 5e-6


@pytest.fixture(name="flash2")
def _flash2(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", fake_flash)
    return KERNELS["flash_attn_2"]


MORE = spans(40, [(4, 15), (30, 40)], width=9, beyond_width=True)
"""Windows with both limits, on either side of the diagonal."""


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_adapters_of_cuda_kernels_do_every_mask(
    mask: str, degree: int, flash2: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = FakeOps("2.13")
    monkeypatch.setattr(kernels_cuda, "_forward", ops.forward)
    monkeypatch.setattr(kernels_cuda, "_backward", ops.backward)
    bands = [MASKS[mask].bands(length) for length in (41, 1, 26)]
    for kernel in (flash2, KERNELS["cuda_flash"]):
        assert ring_error(kernel, degree, None, bands) < 5e-6


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_flash_attn_2_is_called_by_its_signature(
    degree: int, softcap: float | None, flash2: Kernel
) -> None:
    assert ring_error(flash2, degree, softcap, (*BANDS, MORE)) < 5e-6


@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize("release", sorted(SCHEMAS))
def test_torchs_cuda_ops_are_called_by_the_schema_of_each_release(
    release: str, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = FakeOps(release)
    monkeypatch.setattr(kernels_cuda, "_forward", ops.forward)
    monkeypatch.setattr(kernels_cuda, "_backward", ops.backward)
    assert ring_error(KERNELS["cuda_flash"], degree, None, (*BANDS, MORE)) < 5e-6


def test_the_recorded_schema_is_that_of_the_installed_torch() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    if release not in SCHEMAS:
        pytest.skip(f"no schema of torch {release} is recorded")
    ops = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    installed = tuple(str(op.default._schema) for op in ops)
    assert installed == SCHEMAS[release]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 3}, "'window'} are not in aten"),
        ({"window_size_left": True}, "window_size_left is True"),
        ({"scale": torch.ones(())}, "scale is tensor"),
    ],
)
def test_a_call_that_does_not_bind_to_a_schema_is_found(
    change: dict[str, object], message: str
) -> None:
    x = torch.ones(1, 1, 8)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    args = (x, x, x, starts, starts, 1, 1, 0.0, True, False)
    keywords = {"scale": 0.5, "window_size_left": -1, "window_size_right": 0}
    FakeOps("2.13").forward(*args, **keywords)
    with pytest.raises(AssertionError, match=message):
        FakeOps("2.13").forward(*args, **(keywords | change))
    with pytest.raises(AssertionError, match="11 positional arguments"):
        FakeOps("2.13").forward(*args, 0.5, **keywords)


@pytest.mark.parametrize("name", ["flash_attn_2", "cuda_flash"])
def test_rows_without_keys_have_a_log_sum_exp_of_minus_infinity(
    name: str, flash2: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    del flash2
    monkeypatch.setattr(kernels_cuda, "_forward", FakeOps("2.13").forward)
    (call,) = KERNELS[name].calls([Tile(0, 3, 0, 3, 0, 2)])
    # The last key of three queries and one key stands at the last query.
    starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    call = replace(call, keys=(1,), k_rows=slice(0, 1), starts=starts)
    q, k = torch.ones(3, 2, 8), torch.ones(1, 2, 8)
    out, lse = KERNELS[name].forward(q, k, k, call, scale=1.0, softcap=None)
    assert lse.tolist() == [[-math.inf] * 2, [-math.inf] * 2, [8.0] * 2]
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 1.0]


def test_torchs_cuda_op_is_called_by_its_schema() -> None:
    """On the meta device, which checks arguments and shapes and computes nothing."""
    kernel = KERNELS["cuda_flash"]
    plan = plan_attention(LENGTHS, degree=2, bands=BANDS)
    meta = torch.device("meta")
    tokens, fetched = plan.tokens[0], plan.fetched(0)
    q = torch.empty(tokens, 6, 16, dtype=torch.bfloat16, device=meta)
    for source, rows in ((0, tokens), (1, fetched)):
        k = torch.empty(rows, 2, 16, dtype=torch.bfloat16, device=meta)
        calls = plan.prepare(0).calls(kernel, meta, [0, 1])[source]
        assert calls
        for call in calls:
            out, lse = kernel.forward(q, k, k, call, scale=0.3, softcap=None)
            assert out.shape == (sum(call.queries), 6, 16)
            assert lse.shape == (sum(call.queries), 6)
            all_lse = torch.empty(tokens, 6, device=meta)
            grads = kernel.backward(q, q, k, k, q, all_lse, call, scale=0.3, softcap=None)
            assert grads[0].shape == out.shape
            assert grads[1].shape == grads[2].shape == (sum(call.keys), 2, 16)


def test_auto_takes_the_cpu_op_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    choose.cache_clear()
    with caplog.at_level(logging.INFO, logger="dynapar.attention.kernels"):
        assert choose(request()).name == "cpu_flash"
    assert "attention kernel cpu_flash" in caplog.text
    assert "flash_attn_2: it runs on CUDA, not on cpu" in caplog.text


def test_auto_takes_the_math_kernel_for_softcap() -> None:
    assert choose(request(softcap=True)).name == "math"


def test_softcap_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(
        KernelError,
        match=r"'cpu_flash' cannot run .*: it has no softcap; expected one of \['math'\]",
    ):
        choose(request(softcap=True), name="cpu_flash")


def test_a_missing_kernel_is_named() -> None:
    with pytest.raises(KernelError, match=r"'flash' .*: there is no such kernel; expected one of"):
        choose(request(), name="flash")


def test_nothing_runs_integers() -> None:
    with pytest.raises(KernelError, match=r"'auto' .*math: it has no torch.int64; expected one of"):
        choose(request(dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "it runs on CUDA, not on cpu"),
        ({"device": "cuda"}, "it has float16 and bfloat16, not torch.float32"),
        ({"device": "cuda", "dtype": torch.bfloat16, "head_dim": 512}, "head dimensions of 8 to"),
        ({"device": "cuda", "dtype": torch.bfloat16}, "flash-attn cannot be imported"),
    ],
)
def test_flash_attn_2_says_why_it_cannot_run(
    changes: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)
    why = KERNELS["flash_attn_2"].unusable(request(**changes))
    assert why is not None
    assert reason in why


@pytest.mark.parametrize("softcap", [False, True])
def test_flash_attn_2_runs_where_it_is_installed(softcap: bool, flash2: Kernel) -> None:
    where = request(device="cuda", dtype=torch.bfloat16, softcap=softcap)
    assert flash2.unusable(where) is None


def test_an_old_flash_attn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("flash_attn.flash_attn_interface")
    exec("def _flash_attn_varlen_forward(q, k, v, window_size): ...", old.__dict__)
    monkeypatch.setitem(sys.modules, "flash_attn", old)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", old)
    where = request(device="cuda", dtype=torch.bfloat16)
    assert KERNELS["flash_attn_2"].unusable(where) == (
        "the installed flash-attn takes ['q', 'k', 'v', 'window_size']; version 2.7 or newer is "
        "needed"
    )


@pytest.mark.parametrize("name", ["flash_attn_2", "cuda_flash"])
def test_old_gpus_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    where = request(device="cuda", dtype=torch.bfloat16)
    assert KERNELS[name].unusable(where) == (
        "it needs compute capability 8.0, and this GPU has 7.5"
    )


def test_torchs_cuda_op_has_no_softcap() -> None:
    where = request(device="cuda", dtype=torch.bfloat16, softcap=True)
    assert KERNELS["cuda_flash"].unusable(where) == "it has no softcap"
