"""Keep a run's state on disk, so that it goes on exactly where it stopped, on any number of ranks.

A checkpoint is a directory of torch.distributed.checkpoint. What is in it does not depend on the
layout: model and optimizer by parameter name, and one JSON text with the step, the loader's state
and the run's *identity*: the settings without which the rest would mean something else.

Its `.metadata` is written last, so a directory without it is the remains of a run that died while
saving. Nothing is overwritten: each save has a directory of its own, and the file `latest` is
renamed into place after it.

Beside `.metadata` lies `checksums.json`, the CRC-32 of every file, by which damage is found before
anything is loaded. A save that was cut off right before it is complete, but not checked.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from dynapar.errors import CheckpointError

VERSION = 1
_RUN = "run"
_CHECKSUMS = "checksums.json"
_CHUNK = 1 << 24  # bytes

_UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    ArithmeticError,
    MemoryError,
    AssertionError,
)
"""What reading a pickle of any bytes may raise."""

State = dict[str, Tensor | str]
"""What torch.distributed.checkpoint saves and loads, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come, and which run it is."""

    step: int
    """Steps done."""
    loader: Mapping[str, object]
    """The loader's state; JSON values."""
    identity: Mapping[str, str | int]
    """By the configuration's key, what must be equal in the run that goes on from here."""


def directory(folder: Path, step: int) -> Path:
    """Of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def find_latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    The file `latest` is for people and scripts; what counts is the newest directory that has its
    `.metadata`.
    """
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, key=lambda path: path.name, default=None)


def save(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    keep: int = 2,
) -> Path:
    """Write a checkpoint; a collective call of all ranks of the default group.

    Args:
        folder: Holds the run's checkpoints.
        model: Equal on all ranks; without a wrapper.
        optimizer: Equal on all ranks.
        progress: Equal on all ranks.
        keep: Newest complete checkpoints that stay; older ones, and remains of saves that were
            cut off, are deleted after this one is complete.

    Returns:
        The checkpoint's directory.
    """
    path = directory(folder, progress.step)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and path.exists():
        shutil.rmtree(path)  # of a save that was cut off: a complete one is gone on from
    run = {
        "version": VERSION,
        "step": progress.step,
        "loader": dict(progress.loader),
        "identity": dict(progress.identity),
    }
    state: State = _model_state(model) | _optimizer_state(model, optimizer)
    # No rank writes before all have met in the save's first collective, so none into what rank 0
    # removes.
    save_shards({**state, _RUN: json.dumps(run)}, checkpoint_id=path)
    if first:
        (path / _CHECKSUMS).write_text(json.dumps(_checksums(path)), encoding="utf-8")
        temporary = folder / "latest.new"
        temporary.write_text(path.name + "\n", encoding="utf-8")
        os.replace(temporary, folder / "latest")
        _tidy(folder, keep)
    return path


def _tidy(folder: Path, keep: int) -> None:
    found = sorted(folder.glob("step-*"))
    complete = [path for path in found if (path / ".metadata").exists()]
    for path in set(found) - set(complete[-keep:]):
        shutil.rmtree(path)


def verify(path: Path) -> None:
    """Compare a checkpoint's files with its checksums; a collective call of the default group.

    Rank 0 reads them; all ranks end alike.

    Raises:
        CheckpointError: A file is damaged or gone; it is named.
    """
    alone = not dist.is_initialized()
    found = [_find_damage(path) if alone or dist.get_rank() == 0 else None]
    if not alone:
        dist.broadcast_object_list(found)
    if (damage := found[0]) is not None:
        raise _damaged(path, damage)


def _find_damage(path: Path) -> str | None:
    try:
        text = (path / _CHECKSUMS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{_CHECKSUMS}: {_reason(error)}"
    try:
        expected = dict(json.loads(text))
        found = _checksums(path)
    except (OSError, ValueError, TypeError) as error:
        return f"{_CHECKSUMS}: {_reason(error)}"
    for name, checksum in expected.items():
        if name not in found:
            return f"its file {name} is gone"
        if found[name] != checksum:
            return f"its file {name} has CRC-32 {found[name]}; expected {checksum}, as saved"
    return None


def _checksums(path: Path) -> dict[str, str]:
    """CRC-32 by name, of all files but that of the checksums."""
    sums = {}
    for file in sorted(path.iterdir()):
        if file.name == _CHECKSUMS:
            continue
        checksum = 0
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                checksum = zlib.crc32(chunk, checksum)
        sums[file.name] = f"{checksum:08x}"
    return sums


def read_progress(path: Path) -> Progress:
    """What a checkpoint says of its run, without its tensors; a collective call.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, or of another version.
    """
    state: State = {_RUN: ""}
    _load(state, path)
    run = json.loads(str(state[_RUN]))
    if run["version"] != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has version {run['version']}; expected {VERSION}. Go on with the "
            "version of dynapar that wrote it, or start in an empty folder"
        )
    return Progress(step=run["step"], loader=run["loader"], identity=run["identity"])


def check_identity(path: Path, *, found: Progress, identity: Mapping[str, str | int]) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        CheckpointError: A setting differs; it is named, with both values.
    """
    for name, value in identity.items():
        if found.identity.get(name) != value:
            raise CheckpointError(
                f"checkpoint {path} is of another run: its {name} is "
                f"{found.identity.get(name)!r}, the configuration's is {value!r}. Restore "
                f"{name}, or give the run another checkpoint.folder"
            )


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read parameters and optimizer state into place; a collective call of the default group.

    Args:
        path: From `find_latest`.
        model: Of the same architecture; any number of ranks.
        optimizer: Of the same parameters; keeps its own learning rate and other settings.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or lacks a parameter.
    """
    tensors = {
        name: entry
        for name, entry in _metadata(path).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    state = _model_state(model)
    for name, parameter in model.named_parameters():
        kept: dict[str, Tensor] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if (entry := tensors.get(f"optimizer.{name}.{key}")) is not None:
                # AdamW's step counts stay on the CPU.
                device = torch.device("cpu") if key == "step" else parameter.device
                kept[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
                state[f"optimizer.{name}.{key}"] = kept[key]
        # A parameter without a gradient so far, such as an encoder's before the first image,
        # has no state, and none is made up for it.
        if kept:
            optimizer.state[parameter] = kept
    _load(state, path)


def _model_state(model: nn.Module) -> State:
    state = model.state_dict()
    return {f"model.{name}": tensor for name, tensor in state.items()}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _metadata(path: Path) -> Metadata:
    try:
        metadata: object = FileSystemReader(path).read_metadata()
    except _UNREADABLE as error:
        raise _damaged(path, f"its file .metadata: {_reason(error)}") from error
    if not isinstance(metadata, Metadata):
        raise _damaged(path, f"its file .metadata holds a {type(metadata).__name__}")
    return metadata


def _load(state: State, path: Path) -> None:
    _metadata(path)  # torch would print its tracebacks for a damaged one
    try:
        load_shards(state, checkpoint_id=path)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _damaged(path, f"tensor files, on rank {rank}: {_reason(cause)}") from error
    except _UNREADABLE as error:
        raise _damaged(path, f"tensor files: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} cannot be read ({reason}). Delete its directory: the run then goes on "
        "from the one before it"
    )
