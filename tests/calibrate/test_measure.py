"""A calibration on two real ranks, and ranks that fail or die on the way."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dynapar.calibrate.blocks import Block
from dynapar.calibrate.command import calibrate, report
from dynapar.calibrate.measure import Job, load_block, time_blocks
from dynapar.errors import CostsError
from dynapar.train.config import read_run_config
from dynapar.verify.batches import Batches
from tests.verify.small_run import write_small_run


def test_a_real_measurement(tmp_path: Path) -> None:
    found = calibrate(read_run_config(write_small_run(tmp_path)), rounds=3, budget=1.0)
    assert found.costs.measured
    assert found.rounds == 3
    assert (found.seconds > 0).all()
    assert found.costs.host is not None
    assert found.costs.host.bytes_per_s > 1e6
    assert found.link.bytes_per_s > 1e4
    assert found.costs.exchange.bytes_per_s_in_node == found.link.bytes_per_s
    text = "\n".join(report(found))
    assert "3 rounds" in text
    assert "copies between device and host" in text
    assert "messages between two ranks" in text


def test_a_text_has_the_targets_that_are_counted(tmp_path: Path) -> None:
    batches = Batches(read_run_config(write_small_run(tmp_path)))
    for share in (1.0, 0.2, 0.0):
        block = Block(kind="text", lengths=(2, 17, 90), share=share)
        loaded = load_block(batches, block)
        counts = [int((sample.targets != -100).sum()) for sample in loaded.values()]
        assert counts == list(block.targets(batches.table))
        for sample in loaded.values():
            places = (sample.targets[:-1] != -100).nonzero().flatten()
            assert (sample.targets[places] == sample.input_ids[places + 1]).all()


class Killed(tuple[int, ...]):
    """Rows on which a rank dies, but not the process that started it."""

    def __iter__(self) -> object:  # type: ignore[override]
        if multiprocessing.parent_process() is not None:
            os._exit(9)
        return super().__iter__()


@pytest.mark.parametrize(
    ("rows", "reason"), [((10**6,), "IndexError"), (Killed((0,)), "exit")], ids=["fails", "dies"]
)
def test_a_rank_that_fails_or_dies_ends_it(
    rows: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    config = read_run_config(write_small_run(tmp_path))
    blocks = (
        Block(kind="ring", lengths=(40,), degree=2),
        Block(kind="text", lengths=(20,)),
        Block(kind="encoder", rows=rows),
    )
    job = Job(config=replace(config, timeout_seconds=30), blocks=blocks, rounds=3, budget=1.0)
    with pytest.raises(
        CostsError, match=rf"(?s)no costs were written: .*{reason}.*calibrate again"
    ):
        time_blocks(job)
