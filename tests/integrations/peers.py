"""The real code of Megatron Core and verl, where it is installed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

VERL_NEEDS = {
    "tensordict": ("TensorDict",),
    "verl": (),
    "verl.protocol": ("DataProto",),
    "verl.utils": (),
    "verl.utils.device": ("get_device_name",),
    "verl.utils.py_functional": ("append_to_dict",),
    "verl.utils.tensordict_utils": (),
}
"""What the two modules of verl import beside torch: none of it is used in scheduling."""
VERL_MODULES = ("dynamic_cp_scheduler", "seqlen_balancing")


def megatron(name: str) -> ModuleType:
    """A module of Megatron Core; the test is skipped where it is not installed."""
    _installed("megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


@contextmanager
def verl() -> Iterator[dict[str, ModuleType]]:
    """The two modules of verl, by their short names.

    verl as a whole does not import without ray and more, so what they import is stood in for.
    """
    files = {path.name: path for path in _installed("verl") if path.parent.name == "utils"}
    before = {name: sys.modules.get(name) for name in VERL_NEEDS}
    made = {}
    try:
        for name, attributes in VERL_NEEDS.items():
            sys.modules[name] = ModuleType(name)
            for attribute in attributes:
                setattr(sys.modules[name], attribute, object)
        sys.modules["verl.utils"].tensordict_utils = sys.modules["verl.utils.tensordict_utils"]  # type: ignore[attr-defined]
        for short in VERL_MODULES:
            spec = spec_from_file_location(
                f"verl.utils.{short}", str(files[f"{short}.py"].locate())
            )
            assert spec is not None
            assert spec.loader is not None
            made[short] = module_from_spec(spec)
            sys.modules[spec.name] = made[short]
            setattr(sys.modules["verl.utils"], short, made[short])
            spec.loader.exec_module(made[short])
        yield made
    finally:
        for name, module in (
            before | dict.fromkeys(f"verl.utils.{s}" for s in VERL_MODULES)
        ).items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _installed(name: str) -> list:  # type: ignore[type-arg]
    try:
        return list(distribution(name).files or ())
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed: scripts/setup installs it")
