"""Any ring in one process: degrees, kernels and masks that four ranks on two cores do not reach."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dynapar.attention import staged
from dynapar.attention.bands import Bands, causal, full, window
from dynapar.attention.evenly import cut_evenly
from dynapar.attention.kernels_cpu import CpuFlash
from dynapar.attention.plan import AttentionPlan, plan_attention
from tests.attention.loopback import LoopbackTransport, run_loopback
from tests.attention.oracle import MASKS
from tests.attention.test_ring import Case, inputs, run, wanted, worst
from tests.attention.test_tiles import plans

F64 = torch.float64


def check(plan: AttentionPlan, bands: list[Bands], kernel: str) -> None:
    case = Case(plan.lengths, tuple(bands))
    whole, _ = inputs(case, F64)
    want = wanted(case, whole, None)
    ranks = list(range(plan.degree))[::-1]

    def rank(transport: LoopbackTransport) -> float:
        got, index = run(plan, ranks, transport, whole, F64, kernel=kernel)
        return worst(got, want, index)

    assert max(run_loopback(plan.degree, rank)) < 1e-12


@settings(max_examples=40)
@given(plans())
def test_any_ring_with_the_cpu_kernel(planned: tuple[AttentionPlan, list[Bands]]) -> None:
    check(*planned, "cpu_flash")


@settings(max_examples=40)
@given(plans())
def test_any_ring_with_the_math_kernel(planned: tuple[AttentionPlan, list[Bands]]) -> None:
    check(*planned, "math")


def test_degree_12() -> None:
    lengths = [301, 17, 3]
    bands = [causal(301), full(17), causal(3)]
    check(plan_attention(lengths, degree=12, bands=bands), bands, "auto")


def bfloat16_errors(degree: int) -> list[float]:
    """Relative RMS error of the output and of each gradient, over all ranks."""
    case = Case((600, 131, 40), (causal(600), full(131), causal(40)))
    whole, _ = inputs(case, torch.bfloat16)
    want = wanted(case, whole, None)
    plan = plan_attention(case.lengths, degree=degree, bands=case.bands)

    def rank(transport: LoopbackTransport) -> list[float]:
        got, index = run(plan, list(range(degree)), transport, whole, torch.bfloat16)
        return [float((a - b[index]).square().sum()) for a, b in zip(got, want, strict=True)]

    squares = torch.tensor(run_loopback(degree, rank)).sum(0)
    return [math.sqrt(s / float(w.square().sum())) for s, w in zip(squares, want, strict=True)]


def test_bfloat16_error_does_not_grow_with_the_degree() -> None:
    alone = bfloat16_errors(1)
    assert max(alone) < 1e-2
    for degree in (2, 3, 4, 8):
        for one, many in zip(alone, bfloat16_errors(degree), strict=True):
            assert many < 1.5 * one, (degree, one, many)


def test_a_wrong_band_is_noticed() -> None:
    """The checks above can fail: shift the diagonal by one token."""
    lengths = [60, 33]
    wrong = [(band[0]._replace(lo=1),) for band in map(causal, lengths)]
    plan = plan_attention(lengths, degree=2, bands=wrong)
    case = Case(tuple(lengths), tuple(map(causal, lengths)))
    whole, _ = inputs(case, F64)
    want = wanted(case, whole, None)

    def rank(transport: LoopbackTransport) -> float:
        got, index = run(plan, [0, 1], transport, whole, F64)
        return worst(got, want, index)

    assert min(run_loopback(2, rank)) > 0.1


def test_large_masked_tiles_are_cut_in_blocks_of_rows() -> None:
    """Longer than one block, on two positions, with a window: each block has its own corner."""
    bands = [window(1300, width=200)]
    check(plan_attention([1300], degree=2, bands=bands), bands, "cpu_flash")


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("mask", MASKS)
def test_bytes_of_log_normal_packs_are_within_2_percent_of_what_is_needed(
    mask: str, degree: int
) -> None:
    """Needed is counted pair by pair: a key that some query of another position sees."""
    drawn = np.random.default_rng(degree).lognormal(math.log(40), 0.8, 16)
    lengths = np.maximum(1, drawn.astype(np.int64)).tolist()
    bands = [MASKS[mask].bands(length) for length in lengths]
    even = cut_evenly(lengths, degree=degree, masks=[bands])
    plan = plan_attention(lengths, degree=degree, bands=bands, spans=even)
    seen = torch.block_diag(*(MASKS[mask].dense(length) for length in lengths)).bool()
    held = [torch.from_numpy(plan.index(position)) for position in range(degree)]
    needed = sum(
        int(seen[held[mine]][:, held[theirs]].any(0).sum())
        for mine, theirs in itertools.permutations(range(degree), 2)
    )
    q, k = torch.zeros(sum(lengths), 4, 8), torch.zeros(sum(lengths), 2, 8)

    def rank(transport: LoopbackTransport) -> int:
        bound = plan.bind(ranks=range(degree), transport=transport)
        index = held[bound.position]
        setting = staged.Setting(plan=bound, kernel=CpuFlash(), scale=1.0, softcap=None)
        staged.forward(q[index], k[index], k[index], None, setting)
        return transport.sent

    sent = sum(run_loopback(degree, rank))
    assert needed > 0
    assert needed <= sent / (2 * 2 * 8 * 4) <= 1.02 * needed


def test_bytes_on_the_wire_are_those_of_the_needed_rows() -> None:
    lengths = [400, 90]
    plan = plan_attention(lengths, degree=4, bands=[causal(n) for n in lengths])
    q, k = torch.zeros(490, 4, 8), torch.zeros(490, 2, 8)

    def rank(transport: LoopbackTransport) -> int:
        bound = plan.bind(ranks=[0, 1, 2, 3], transport=transport)
        index = torch.from_numpy(plan.index(bound.position))
        setting = staged.Setting(plan=bound, kernel=CpuFlash(), scale=1.0, softcap=None)
        staged.forward(q[index], k[index], k[index], None, setting)
        return transport.sent

    needed = sum(plan.fetched(position) for position in range(4))
    assert sum(run_loopback(4, rank)) == needed * 2 * 2 * 8 * 4
