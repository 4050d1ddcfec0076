"""Which samples a step takes where samples of one prefix go into one step.

The order is that of `Sampler`, of *groups* instead of samples: all samples of a prefix, or one that
shares nothing. A step takes whole groups, in order, as long as they hold no more than
`global_batch` samples; so it may have fewer. A prefix of more samples than that makes several
groups, cut in the order of the source. Each epoch holds every sample exactly once.

Where a step begins follows from the sizes of all groups before it in its run: the first call for a
late step takes time that grows with the steps passed since the state that the run started from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dynapar.data.sampler import IntArray, Sampler
from dynapar.errors import CheckpointError, ConfigError
from dynapar.meta import SampleTable


class GroupSampler:
    """The order of groups; free of ranks and workers; used as `Sampler`."""

    def __init__(
        self,
        prefixes: Sequence[str],
        *,
        global_batch: int,
        seed: int,
        block: int = 1,
        window: int = 16,
        shuffle: bool = True,
    ) -> None:
        """Start at step 0.

        Args:
            prefixes: For each sample of the source the id of its prefix; empty for none.
            global_batch: Most samples of a step.
            seed: As of `Sampler`.
            block: As of `Sampler`, of groups.
            window: As of `Sampler`.
            shuffle: False for groups in the order in which their first samples stand in the source.

        Raises:
            ConfigError: A number is out of range.
        """
        if global_batch < 1:
            raise ConfigError(f"GroupSampler: global_batch is {global_batch}; expected 1 or more")
        groups = _groups(prefixes, global_batch)
        self._sizes = np.array([len(group) for group in groups], np.int64)
        self._ends = np.cumsum(self._sizes)
        self._rows = np.array([row for group in groups for row in group], np.int64)
        self._order = Sampler(
            len(groups), global_batch=global_batch, seed=seed, block=block, window=window,
            shuffle=shuffle,
        )  # fmt: skip
        self.samples, self.global_batch = len(prefixes), global_batch
        self._step = 0
        self._begins = [0]
        """Places of the order of groups at which the steps from `_step` on begin."""

    def rows(self, step: int) -> IntArray:
        """The samples of a step, as rows of the index.

        Args:
            step: 0 or more; at or after the step that a loaded state starts at.

        Returns:
            (k,) int64 in [0, samples), 1 <= k <= global_batch; those of a group stand together.
        """
        begin, end = self._begin(step), self._begin(step + 1)
        groups = self._order.at(np.arange(begin, end))
        counts = self._sizes[groups]
        offsets = np.cumsum(counts) - counts
        starts = self._ends[groups] - counts
        return self._rows[np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))]

    def epoch(self, step: int) -> float:
        """Epochs passed before a step, with a fraction, by groups."""
        return self._begin(step) / len(self._sizes)

    def state_dict(self, step: int) -> dict[str, int | bool]:
        """The state before a step: a few numbers, the same on all ranks.

        As of `Sampler`, with `samples` and `cursor` counting groups; `grouped` counts samples.
        """
        return {**self._order.state_at(step, self._begin(step)), "grouped": self.samples}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a state; the global batch may be another one if it cuts prefixes alike.

        Raises:
            CheckpointError: The state is of another order of samples, or incomplete.
        """
        if state.get("grouped") != self.samples:
            raise CheckpointError(
                f"the checkpoint's order of groups is of {state.get('groups')!r} samples, this "
                f"run's of {self.samples}; expected equal ones. Resume with the first run's "
                "group_by and index."
            )
        rest = {key: value for key, value in state.items() if key != "grouped"}
        self._step, begin = self._order.read_state(rest)
        self._begins = [begin]

    def _begin(self, step: int) -> int:
        if step < self._step:
            raise ConfigError(f"step {step} lies before step {self._step}, where this run starts")
        while len(self._begins) <= step - self._step:
            begin = self._begins[-1]
            ahead = self._order.at(np.arange(begin, begin + self.global_batch))
            held = np.cumsum(self._sizes[ahead])
            taken = int(np.searchsorted(held, self.global_batch, side="right"))
            self._begins.append(begin + taken)
        return self._begins[step - self._step]


def make_sampler(
    table: SampleTable,
    *,
    group_by: str | None,
    global_batch: int,
    seed: int,
    block: int = 1,
    shuffle: bool = True,
) -> Sampler | GroupSampler:
    """The order of a source's samples, or of its groups.

    Args:
        table: The source.
        group_by: "prefix" for groups; None for samples.
        global_batch: Samples of a step, or the most of them.
        seed: As of `Sampler`.
        block: As of `Sampler`.
        shuffle: As of `Sampler`.

    Raises:
        ConfigError: Groups are asked for, and the source says nothing of prefixes; or a number is
            out of range.
    """
    if group_by is None:
        return Sampler(
            len(table), global_batch=global_batch, seed=seed, block=block, shuffle=shuffle
        )
    if table.prefixes is None:
        raise no_prefixes("the source")
    names = table.prefixes.ids
    return GroupSampler(names, global_batch=global_batch, seed=seed, block=block, shuffle=shuffle)


def no_prefixes(source: str) -> ConfigError:
    """The error where samples are to be grouped that share nothing."""
    return ConfigError(
        f"samples are to be grouped by prefix, and {source} says of none what prefix it shares; "
        f'expected "prefix": {{"id": ..., "tokens": ...}} in some lines of a metadata file, or '
        f'"prefix": ID in some conversations and an index made of them since. Add them, or leave '
        f"group_by out"
    )


def _groups(prefixes: Sequence[str], most: int) -> list[list[int]]:
    """Rows of each group, by their first rows."""
    groups: list[list[int]] = []
    growing: dict[str, list[int]] = {}
    for row, name in enumerate(prefixes):
        group = growing.get(name) if name else None
        if group is None or len(group) == most:
            group = []
            groups.append(group)
            growing[name] = group
        group.append(row)
    return groups
