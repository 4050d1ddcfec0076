"""Which samples a step takes: a seeded order of each epoch, computed where it is needed.

The order has two levels: blocks of consecutive samples are permuted, then the samples of each
window of blocks. Both permutations are small ciphers over positions, so no list is kept: any step's
samples follow from (seed, epoch, position) in time that grows with the step alone, and all ranks
compute the same ones. With `block=1` the first level is a full shuffle. Larger blocks read files
in long runs; `window` blocks are then mixed.

Epochs follow each other without a seam: where an epoch ends in the middle of a step, the step goes
on with the next epoch's first samples. Each epoch holds every sample exactly once, nothing is
dropped or repeated to fill a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dynapar.errors import CheckpointError, ConfigError

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 6


class Sampler:
    """The order of samples; free of ranks and workers."""

    def __init__(
        self,
        samples: int,
        *,
        global_batch: int,
        seed: int,
        block: int = 1,
        window: int = 16,
        shuffle: bool = True,
    ) -> None:
        """Start at step 0.

        Args:
            samples: Samples of the source, 1 or more.
            global_batch: Samples of a step.
            seed: Of all epochs' orders, 0 or more.
            block: Consecutive samples that stay near each other; 1 for a full shuffle.
            window: Blocks whose samples are mixed; without effect where `block` is 1.
            shuffle: False for the source's own order in every epoch.

        Raises:
            ConfigError: A number is out of range.
        """
        for name, value, least in (
            ("samples", samples, 1),
            ("global_batch", global_batch, 1),
            ("seed", seed, 0),
            ("block", block, 1),
            ("window", window, 1),
        ):
            if value < least:
                raise ConfigError(f"Sampler: {name} is {value}; expected {least} or more")
        self.samples = samples
        self.global_batch = global_batch
        self._seed, self._block, self._window, self._shuffle = seed, block, window, shuffle
        self._step, self._position = 0, 0

    def rows(self, step: int) -> IntArray:
        """The samples of a step, as rows of the index.

        Args:
            step: 0 or more; at or after the step that a loaded state starts at.

        Returns:
            (global_batch,) int64 in [0, samples).
        """
        first = self._first(step)
        return self.at(np.arange(first, first + self.global_batch))

    def at(self, positions: IntArray) -> IntArray:
        """The samples at some places, (k,) ascending, of the order of all epochs one by one."""
        epochs = positions // self.samples
        rows = np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            rows[here] = self._order(positions[here] - epoch * self.samples, epoch)
        return rows

    def epoch(self, step: int) -> float:
        """Epochs passed before a step, with a fraction."""
        return self._first(step) / self.samples

    def state_dict(self, step: int) -> dict[str, int | bool]:
        """The state before a step: a few numbers, the same on all ranks."""
        return self.state_at(step, self._first(step))

    def state_at(self, step: int, position: int) -> dict[str, int | bool]:
        """The state before a step that begins at a place of the order, as of `at`."""
        epoch, cursor = divmod(position, self.samples)
        return {
            "step": step,
            "epoch": epoch,
            "cursor": cursor,
            "seed": self._seed,
            "samples": self.samples,
            "block": self._block,
            "window": self._window,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a state; the global batch may be another one.

        Raises:
            CheckpointError: The state is of another order of samples, or incomplete.
        """
        self._step, self._position = self.read_state(state)

    def read_state(self, state: Mapping[str, object]) -> tuple[int, int]:
        """The step that a state is before, and its place in the order, as of `at`.

        Raises:
            CheckpointError: As `load_state_dict`.
        """
        if "grouped" in state:
            raise CheckpointError(
                "the checkpoint's order of samples is one of groups; this run has no group_by. "
                "Resume with group_by: prefix, as the first run"
            )
        mine = self.state_dict(self._step)
        numbers: dict[str, int] = {}
        for key in mine:
            value = state.get(key)
            if not isinstance(value, int):
                raise CheckpointError(f"the sampler's state has {key} {value!r}; expected a number")
            numbers[key] = value
        for key in ("samples", "seed", "block", "window", "shuffle"):
            if numbers[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint's order of samples has {key} {numbers[key]}, this run's "
                    f"{mine[key]}; expected equal ones. Resume with the first run's "
                    "configuration and index."
                )
        return numbers["step"], numbers["epoch"] * self.samples + numbers["cursor"]

    def _first(self, step: int) -> int:
        if step < self._step:
            raise ConfigError(f"step {step} lies before step {self._step}, where this run starts")
        return self._position + (step - self._step) * self.global_batch

    def _order(self, positions: IntArray, epoch: int) -> IntArray:
        """Samples at some positions of an epoch."""
        if not self._shuffle:
            return positions
        if self._block > 1:
            positions = self._mix_windows(positions, epoch)
        blocks = -(-self.samples // self._block)
        key = _mix(self._seed, epoch, -1)
        # The last block may be short; what lies after it has that much less before it.
        short = blocks * self._block - self.samples
        end = (_inverse(blocks - 1, blocks, key) + 1) * self._block - short
        shifted = positions + np.where(positions >= end, short, 0)
        place = permute(shifted // self._block, blocks, key)
        return place * self._block + shifted % self._block

    def _mix_windows(self, positions: IntArray, epoch: int) -> IntArray:
        size = self._block * self._window
        windows = positions // size
        mixed = np.empty_like(positions)
        for window in np.unique(windows):
            here = windows == window
            first = int(window) * size
            key = _mix(self._seed, epoch, int(window))
            mixed[here] = first + permute(
                positions[here] - first, min(size, self.samples - first), key
            )
        return mixed


def permute(places: IntArray, size: int, key: int) -> IntArray:
    """Where a pseudo-random permutation of range(size) takes some places.

    A Feistel network over the next power of four, walked on until it lands inside.

    Args:
        places: (n,) int64 in [0, size).
        size: 1 or more.
        key: Chooses the permutation.

    Returns:
        (n,) int64, distinct where the places are.

    >>> sorted(permute(np.arange(10), 10, key=7).tolist()) == list(range(10))
    True
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    keys = [_mix(key, number, half) for number in range(_ROUNDS)]
    values = places.astype(np.uint64)
    pending = np.arange(len(places))
    while len(pending):
        values[pending] = _encipher(values[pending], half, keys)
        pending = pending[values[pending] >= size]
    return values.astype(np.int64)


def _inverse(value: int, size: int, key: int) -> int:
    """The place that `permute` takes to `value`."""
    half = max((size - 1).bit_length() + 1, 2) // 2
    keys = [_mix(key, number, half) for number in range(_ROUNDS)]
    while True:
        low, high = value & ((1 << half) - 1), value >> half
        for round_key in reversed(keys):
            low, high = high, low
            scrambled = _scramble(np.array([low], np.uint64), round_key)
            high ^= int(scrambled[0]) & ((1 << half) - 1)
        value = high << half | low
        if value < size:
            return value


def _encipher(values: _Words, half: int, keys: list[int]) -> _Words:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    low, high = values & mask, values >> shift
    for key in keys:
        low, high = high ^ (_scramble(low, key) & mask), low
    return high << shift | low


def _scramble(values: _Words, key: int) -> _Words:
    """SplitMix64's finaliser of value + key."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _mix(*numbers: int) -> int:
    """One 64-bit key out of some numbers."""
    key = np.array([0x243F6A8885A308D3], np.uint64)
    for number in numbers:
        key = _scramble(key, number & ((1 << 64) - 1))
    return int(key[0])
