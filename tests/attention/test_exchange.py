from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynapar.attention.exchange import Transport
from dynapar.runtime.order import OrderLog
from tests.distributed import run_ranks


def test_a_process_alone_is_rank_0_of_1() -> None:
    transport = Transport()
    transport.warm_up()
    assert (transport.rank, transport.members) == (0, (0,))
    transport.exchange([], [], operation="nothing").wait()
    transport.exchange([(0, torch.empty(0))], [], operation="nothing").wait()


def test_a_peer_outside_the_group_is_named() -> None:
    with pytest.raises(ValueError, match=r"exchanges 'rows' with peer 3; expected another rank"):
        Transport().exchange([(3, torch.zeros(1))], [], operation="rows")


def check_batches(rank: int) -> OrderLog:
    """Unequal batches between some ranks only: order within a pair, empty ones left out."""
    log = OrderLog(rank)
    transport = Transport(name="rows", recorder=log)
    transport.warm_up()
    assert transport.among([2, 0]) is transport
    peer = {0: 2, 2: 0}.get(rank)
    if peer is not None:
        sends = [torch.full((3,), float(rank)), torch.empty(0), torch.full((2, 2), rank + 10.0)]
        receives = [torch.empty(3), torch.empty(0), torch.empty(2, 2)]
        pending = transport.exchange(
            [(peer, x) for x in sends], [(peer, x) for x in receives], operation="pair"
        )
        pending.wait()
        pending.wait()
        assert receives[0].tolist() == [float(peer)] * 3
        assert receives[2].tolist() == [[peer + 10.0] * 2] * 2
        operation = log.operations[1]
        assert (operation.communicator, operation.operation) == ("rows", "pair")
        assert operation.sends == operation.receives == ((peer, 12), (peer, 16))
    else:
        assert len(log.operations) == 1
    assert log.operations[0].members == (0, 1, 2)
    return log


def test_batches_between_some_ranks(tmp_path: Path) -> None:
    run_ranks(check_batches, 3, tmp_path)


def check_group(rank: int) -> OrderLog:
    """Peers count within the group; the recorder is told global ranks."""
    log = OrderLog(rank)
    group = dist.new_group([2, 0])
    if rank == 1:
        with pytest.raises(ValueError, match=r"rank 1\) is not in the group of transport 'pair'"):
            Transport(group, name="pair")
        return log
    transport = Transport(group, name="pair", recorder=log)
    transport.warm_up()
    received = torch.empty(1)
    mine = torch.tensor([float(rank)])
    other = 1 - transport.rank
    transport.exchange([(other, mine)], [(other, received)], operation="swap").wait()
    assert received.item() == 2 - rank
    assert log.operations[1].sends == ((2 - rank, 4),)
    return log


def test_a_group_of_its_own(tmp_path: Path) -> None:
    run_ranks(check_group, 3, tmp_path)
