from __future__ import annotations

import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dynapar.errors import CheckpointError
from dynapar.train import checkpoint
from dynapar.train.checkpoint import Progress, check_identity, find_latest, read_progress
from tests.distributed import run_ranks


class _Model(nn.Module):
    """Tied weights, a buffer, a frozen parameter, and one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.frozen(self.embed(ids)))
        return logits.square().sum()


def _make(seed: int) -> tuple[_Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = _Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2)


def _train(model: _Model, optimizer: torch.optim.AdamW, steps: int) -> None:
    for step in range(steps):
        model(torch.tensor([step % 7, 1])).backward()
        optimizer.step()
        optimizer.zero_grad()


def _progress(step: int) -> Progress:
    return Progress(step=step, loader={"cursor": 5, "seed": 1}, identity={"seed": 1, "index": "ab"})


def check_save(rank: int, folder: Path) -> None:
    model, optimizer = _make(0)
    _train(model, optimizer, 2)
    model.table += 1
    checkpoint.save(folder, model=model, optimizer=optimizer, progress=_progress(2))
    _train(model, optimizer, 1)
    if rank == 0:
        torch.save(model.state_dict(), folder / "expected.pt")


def check_load(rank: int, folder: Path) -> None:
    model, optimizer = _make(1)
    path = find_latest(folder)
    assert path is not None
    assert read_progress(path) == _progress(2)
    checkpoint.load(path, model=model, optimizer=optimizer)
    assert model.unused.weight not in optimizer.state
    _train(model, optimizer, 1)
    for name, tensor in torch.load(folder / "expected.pt").items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_after_loading_is_the_unbroken_runs(ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run_ranks(check_save, 2, tmp_path, folder)
    run_ranks(check_load, ranks, tmp_path, folder)
    assert (folder / "latest").read_text() == "step-00000002\n"


def check_remains(rank: int, folder: Path) -> None:
    model, optimizer = _make(0)
    for step in (1, 2, 3):
        checkpoint.save(folder, model=model, optimizer=optimizer, progress=_progress(step), keep=2)
    dist.barrier()
    if rank == 0:
        assert sorted(path.name for path in folder.glob("step-*")) == [
            "step-00000002",
            "step-00000003",
        ]
        # A save that was cut off leaves shards without .metadata.
        (folder / "step-00000003" / ".metadata").rename(folder / "metadata")
        (folder / "step-00000009").mkdir()
    dist.barrier()
    assert find_latest(folder) == folder / "step-00000002"
    checkpoint.save(folder, model=model, optimizer=optimizer, progress=_progress(3), keep=2)
    assert find_latest(folder) == folder / "step-00000003"
    dist.barrier()
    assert not (folder / "step-00000009").exists()


def test_a_save_that_was_cut_off_is_not_gone_on_from(tmp_path: Path) -> None:
    run_ranks(check_remains, 2, tmp_path, tmp_path / "run")


def check_damage_is_found(rank: int, folder: Path) -> None:
    """All ranks name the file, whatever is wrong with it, and before anything is loaded."""
    model, optimizer = _make(0)
    _train(model, optimizer, 1)
    path = checkpoint.save(folder, model=model, optimizer=optimizer, progress=_progress(1))
    dist.barrier()
    checkpoint.verify(path)
    for name in ("__0_0.distcp", ".metadata"):
        whole = (path / name).read_bytes()
        middle = len(whole) // 2
        zeroed = whole[:middle] + bytes(8) + whole[middle + 8 :]
        assert zeroed != whole
        for damaged in (zeroed, whole[:-1], b"", None):
            dist.barrier()
            if rank == 0:
                (path / name).unlink() if damaged is None else (path / name).write_bytes(damaged)
            dist.barrier()
            with pytest.raises(CheckpointError) as caught:
                checkpoint.verify(path)
            what = "is gone" if damaged is None else r"has CRC-32 \w{8}; expected \w{8}, as saved"
            assert re.fullmatch(
                rf"checkpoint \S*step-00000001 cannot be read \(its file {re.escape(name)} {what}\)"
                r"\. Delete its directory: the run then goes on from the one before it",
                str(caught.value),
            )
        dist.barrier()
        if rank == 0:
            (path / name).write_bytes(whole)
    dist.barrier()
    checkpoint.verify(path)


def test_a_damaged_file_is_found_and_named(tmp_path: Path) -> None:
    run_ranks(check_damage_is_found, 2, tmp_path, tmp_path / "run")


def check_damage_without_checksums(rank: int, folder: Path) -> None:
    model, optimizer = _make(0)
    path = checkpoint.save(folder, model=model, optimizer=optimizer, progress=_progress(1))
    (path / "checksums.json").unlink()
    checkpoint.verify(path)
    shard, metadata = path / "__0_0.distcp", path / ".metadata"
    whole = metadata.read_bytes()
    for content in (b"", whole[:-9], b"\x00" * 50, b"garbage", pickle.dumps({"a": 1})):
        metadata.write_bytes(content)
        for read in (read_progress, partial(checkpoint.load, model=model, optimizer=optimizer)):
            with pytest.raises(
                CheckpointError, match=r"^[^\n]*file \.metadata[^\n]*Delete its dir"
            ):
                read(path)
    metadata.write_bytes(whole)
    shard.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"\(tensor files, on rank 0: \w+.*\)\. Delete its dir"
    ):
        checkpoint.load(path, model=model, optimizer=optimizer)


def test_damage_is_one_line_without_checksums_too(tmp_path: Path) -> None:
    run_ranks(check_damage_without_checksums, 1, tmp_path, tmp_path / "run")


def test_damaged_checksums_are_named(tmp_path: Path) -> None:
    for content in ("", "5", "[1]", '{"x": '):
        (tmp_path / "checksums.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"\(checksums\.json: \w+Error: .*Delete its dir"):
            checkpoint.verify(tmp_path)


def test_another_runs_checkpoint_is_refused_by_the_key_that_differs() -> None:
    message = re.escape("checkpoint run/step-1 is of another run: its seed is 1, the config")
    with pytest.raises(CheckpointError, match=message):
        check_identity(Path("run/step-1"), found=_progress(1), identity={"index": "ab", "seed": 2})


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nothing") is None
