"""Count the bytes of all tensors that are alive, storage by storage, on any device.

An allocator says how much it reserved; this says how much the program holds, which is what a
formula can predict, and it needs no GPU. What one kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Within it, every storage that an operator makes counts until nothing holds it any more.

    Attributes:
        live: Bytes that are held now.
        peak: The most that were held at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._held: dict[int, int] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before, such as parameters, as long as they are held."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._held:
                continue
            self._held[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key)

    def reset(self) -> None:
        """Start the peak anew from what is held now."""
        self.peak = self.live

    def _release(self, key: int) -> None:
        self.live -= self._held.pop(key)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and hold what it returns."""
        out = func(*args, **(kwargs or {}))
        self.hold(value for value in tree_iter(out) if isinstance(value, torch.Tensor))
        return out
