"""Keep a run's state on disk, so that it goes on exactly where it stopped, on any number of ranks.

A checkpoint is a directory of torch.distributed.checkpoint. What is in it does not depend on the
layout: model and optimizer by parameter name, and one JSON text with the step, the loader's state
and the run's *identity*: the settings without which the rest would mean something else.

Its `.metadata` is written last, so a directory without it is the remains of a run that died while
saving. Nothing is overwritten: each save has a directory of its own, and the file `latest` is
renamed into place after it.
"""

from __future__ import annotations

import json
import os
import shutil
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
        return FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError) as error:
        raise _damaged(path, error) from error


def _load(state: State, path: Path) -> None:
    try:
        load_shards(state, checkpoint_id=path)
    except (CheckpointException, OSError, EOFError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    reason = str(error).strip().splitlines()[-1]
    return CheckpointError(
        f"checkpoint {path} cannot be read ({reason}). Delete its directory: the run then goes on "
        "from the one before it"
    )
