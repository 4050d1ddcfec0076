"""Groups made once carry any ring: results as on one group, in an order that NCCL bears."""

from pathlib import Path

import pytest
import torch

from dynapar.attention.plan import plan_attention
from dynapar.attention.pooled import PooledTransport, make_pool
from dynapar.attention.select import select
from dynapar.cluster import Cluster
from dynapar.rings import RingRules, windows
from dynapar.runtime.order import OrderLog
from tests.attention.test_ring import CASES, inputs, run, wanted, worst
from tests.distributed import run_ranks

RINGS = [[[0, 1], [2, 3]], [[2, 1], [0], [3]], [[2, 0, 3, 1]], [[1, 2, 3], [0]], [[3, 0], [1, 2]]]


def check_rings(rank: int) -> OrderLog:
    """All rings after each other on one pool, by several schemes, against the oracle."""
    log = OrderLog(rank)
    pool = make_pool(windows(Cluster(nodes=1, ranks_per_node=4), RingRules()), recorder=log)
    assert [str(w.ranks) for w in pool.windows] == [
        "range(0, 2)", "range(1, 3)", "range(2, 4)", "range(0, 3)", "range(1, 4)", "range(0, 4)"
    ]  # fmt: skip
    pool.warm_up()
    case = CASES["causal"]
    whole, _ = inputs(case, torch.float64)
    want = wanted(case, whole, None)
    for rings in RINGS:
        ranks = next(ring for ring in rings if rank in ring)
        degree = len(ranks)
        for scheme in (select(degree), select(degree, name="ulysses")):
            plan = plan_attention(case.lengths, degree=degree, bands=case.bands, scheme=scheme)
            for transport in (pool.among(ranks), pool):
                before = len(log.operations)
                got, index = run(plan, ranks, transport, whole, torch.float64, stages=1)
                assert worst(got, want, index) < 1e-12
                used = {op.communicator for op in log.operations[before:]}
                if transport is not pool and degree > 1:
                    assert used == {f"exchange {min(ranks)}-{max(ranks)}"}
    assert pool.among([0, 1, 2, 3]) is pool.among([3, 0])
    return log


def test_any_ring_on_a_pool_equals_dense_attention(tmp_path: Path) -> None:
    run_ranks(check_rings, 4, tmp_path)


def check_few(rank: int) -> OrderLog:
    """A pool of few windows: a ring uses the smallest that holds it; others are refused."""
    log = OrderLog(rank)
    pool = make_pool([(0, 3), (0, 2), (2, 1), (0, 2)], name="few", recorder=log)
    assert [w.ranks for w in pool.windows] == [range(2), range(3)]
    pool.warm_up()
    if rank < 2:
        other, received = 1 - rank, torch.empty(1)
        pool.exchange(
            [(other, torch.ones(1)), (other, torch.empty(0))],
            [(other, received), (other, torch.empty(0))],
            operation="pair",
        ).wait()
        assert received.item() == 1
        assert log.operations[-1].communicator == "few 0-1"
        assert log.operations[-1].sends == ((other, 4),)
    with pytest.raises(ValueError, match=rf"rank {rank} exchanges with ranks \d to 7, which no wi"):
        pool.exchange([(7, torch.ones(1))], [], operation="nowhere")
    with pytest.raises(ValueError, match=r"a window has 4 ranks from 1; .* of 0 to 2: make the"):
        make_pool([(1, 4)])
    return log


def test_a_pool_of_few_windows(tmp_path: Path) -> None:
    run_ranks(check_few, 3, tmp_path)


def test_a_process_alone_needs_no_group() -> None:
    pool = make_pool([])
    pool.warm_up()
    assert isinstance(pool.among([0]), PooledTransport)
    pool.exchange([(0, torch.empty(0))], [], operation="nothing").wait()
    with pytest.raises(ValueError, match="a window has 2 ranks from 0; expected 1 or more of 0 t"):
        make_pool([(0, 2)])
