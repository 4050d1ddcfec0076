"""Refuse samples whose times are no times: none at all, or too many ticks to count."""

from __future__ import annotations

import numpy as np

from dynapar.costs import TICKS_PER_SECOND
from dynapar.errors import PlanError
from dynapar.meta import SampleTable
from dynapar.packing.ticks import Coefficients

LONGEST = 1 << 40
"""Ticks that one sample may take: 12 days. Sums of them over a step, and products with its ranks,
stay far below what 64 bits hold."""


def check_magnitudes(samples: SampleTable, constants: Coefficients, largest: int) -> None:
    """Check that every sample has tokens, and a time that can be counted.

    Args:
        samples: The step's samples.
        constants: What work costs, in ticks.
        largest: The largest degree.

    Raises:
        PlanError: A sample or an encoder unit has no tokens, or would take `LONGEST` or more, at
            some degree up to the largest; the message names it.
    """
    for row in np.flatnonzero(samples.llm_tokens < 1).tolist():
        raise PlanError(
            f"sample {samples.ids[row]!r} has {int(samples.llm_tokens[row]):,} tokens; expected 1 "
            f"or more. Leave the sample out"
        )
    for unit in np.flatnonzero(samples.unit_tokens < 1).tolist():
        row = int(np.searchsorted(samples.unit_offsets, unit, side="right")) - 1
        raise PlanError(
            f"sample {samples.ids[row]!r} has an encoder unit of "
            f"{int(samples.unit_tokens[unit]):,} encoder tokens; expected 1 or more. Leave the "
            f"unit or the sample out"
        )
    tokens, units = samples.llm_tokens.astype(np.float64), samples.unit_tokens.astype(np.float64)
    pairs = constants.attention_pair * tokens * (tokens + constants.attention_half)
    wires = constants.exchange_layers * constants.wire_across * tokens
    encoder = units * (constants.encoder_token + constants.encoder_square * units)
    sums = np.concatenate(([0.0], np.cumsum(encoder)))
    own = sums[samples.unit_offsets[1:]] - sums[samples.unit_offsets[:-1]]
    ticks = constants.linear_token * tokens + pairs + wires + own
    ticks += constants.fixed + constants.linear_rank + constants.hop * largest
    for row in np.flatnonzero(~(ticks < LONGEST)).tolist():
        raise PlanError(
            f"sample {samples.ids[row]!r} of {int(samples.llm_tokens[row]):,} tokens would take "
            f"{ticks[row] / TICKS_PER_SECOND:.3g} s; expected less than "
            f"{LONGEST / TICKS_PER_SECOND:.3g} s. Check the costs and the length"
        )
