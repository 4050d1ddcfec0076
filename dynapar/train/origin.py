"""Say what costs are measured on: the hardware, the model's sizes, the versions that compute."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from dynapar.costs import MeasuredOn
from dynapar.schemes import measured_as
from dynapar.train.config import RunConfig


def measured_on(config: RunConfig) -> MeasuredOn:
    """What a measurement of this configuration's model is made on, here."""
    settings = json.loads((config.model / "config.json").read_text(encoding="utf-8"))
    settings.pop("transformers_version", None)
    text = json.dumps(settings, sort_keys=True)
    return MeasuredOn(
        hardware=hardware(),
        model=hashlib.sha256(text.encode()).hexdigest()[:16],
        precision=config.precision,
        versions=", ".join(
            f"{name} {version(name)}" for name in ("dynapar", "torch", "transformers")
        ),
        attention=measured_as(config.attention.rules),
    )


def hardware() -> str:
    """The GPU's name, or the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [platform.processor() or platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                names = [line.partition(":")[2].strip()]
                break
    return names[0]
