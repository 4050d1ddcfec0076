"""How many samples of a run became stubs, and from which share on the run has to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynapar.errors import CheckpointError, SampleError

FEWEST = 20
"""Samples of the run before the share of stubs says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StubCount:
    """Of all steps of a run up to some step, those before a resume included; equal on all ranks."""

    drawn: int = 0
    """Samples of those steps."""
    stubs: int = 0
    """Those of them that some rank could not load."""

    def add(self, *, drawn: int, stubs: int) -> StubCount:
        """The count after a further step."""
        return StubCount(drawn=self.drawn + drawn, stubs=self.stubs + stubs)

    def check(self, *, limit: float, last: str) -> None:
        """Stop the run when too much of it is lost.

        Args:
            limit: Largest share of stubs, of `FEWEST` samples or more.
            last: The newest stub and why it is one, for the message.

        Raises:
            SampleError: The share is above the limit.
        """
        if self.stubs > limit * max(self.drawn, FEWEST):
            raise SampleError(
                f"{self.stubs} of {self.drawn} samples of this run could not be loaded; expected "
                f"at most {100 * limit:g}% (of {FEWEST} or more). The last is "
                f"{last.rstrip('.')}. Repair the source and index it again, or raise "
                "batch.stub_limit"
            )

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint, beside the sampler's state."""
        return {"drawn_samples": self.drawn, "stub_samples": self.stubs}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> StubCount:
        """What `state_dict` gave; nothing lost so far where a state lacks it.

        Raises:
            CheckpointError: A value is no count.
        """
        numbers = [state.get(key, 0) for key in ("drawn_samples", "stub_samples")]
        drawn, stubs = (number if isinstance(number, int) else -1 for number in numbers)
        if not 0 <= stubs <= drawn:
            raise CheckpointError(
                f"the loader's state has drawn_samples {numbers[0]!r} and stub_samples "
                f"{numbers[1]!r}; expected two counts. Resume from an older checkpoint"
            )
        return cls(drawn=drawn, stubs=stubs)
