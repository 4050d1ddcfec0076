"""Fit the planner's coefficients to measured microbatches, by robust least squares of 0 or more.

The model is linear in what is sought (`features`), so that what comes out is what
`costs.coefficients` hands to the planner's pricing, and errors are those of that pricing. Residuals
are relative; those beyond `OUTSIDE` standard deviations weigh less (Huber, "Robust Estimation of a
Location Parameter", 1964, by reweighting), and coefficients are 0 or more (Lawson and Hanson,
"Solving Least Squares Problems", 1974, ch. 23; here by trying all sets of columns).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.calibrate.blocks import Block
from dynapar.calibrate.measure import Timings, spread_of
from dynapar.costs import (
    AttentionCosts,
    Costs,
    EncoderCosts,
    ExchangeCosts,
    FixedCosts,
    HostCosts,
    LinearCosts,
    MeasuredOn,
    OutputCosts,
    StepCosts,
)
from dynapar.errors import CostsError
from dynapar.meta import SampleTable
from dynapar.shapes import ModelShape

FloatArray = npt.NDArray[np.float64]

OUTSIDE = 1.345
ROUNDS = 10
FITTED = ("text", "encoder", "ring")
"""Kinds of blocks that the fit sees."""


class Found(NamedTuple):
    """Fitted coefficients: seconds of one unit of each feature."""

    fixed: float
    """A microbatch."""
    linear: float
    """A token on a rank."""
    pair: float
    """A squared token of a segment, shared by its ranks."""
    half: float
    """A token of a segment, however many ranks share it: what does not get cheaper by sharing."""
    encoder: float
    """A token of an encoder unit."""
    square: float
    """A squared token of an encoder unit."""
    hop: float
    """A rank of a ring beyond the first."""
    target: float = 0.0
    """A target on a rank."""


def features(table: SampleTable, block: Block) -> tuple[float, ...]:
    """What each coefficient of `Found` is multiplied by, on the block's first rank."""
    tokens = np.array(block.tokens(table), np.float64)
    units = np.array(block.units(table), np.float64)
    return (
        1.0,
        float(tokens.sum()) / block.degree,
        float(np.square(tokens).sum()) / block.degree,
        float(tokens.sum()),
        float(units.sum()),
        float(np.square(units).sum()),
        block.degree - 1.0,
        float(sum(block.targets(table))) / block.degree,
    )


def medians(blocks: Sequence[Block], timings: Sequence[Timings]) -> tuple[FloatArray, FloatArray]:
    """Of each block: the median of its rounds, mean over its ranks, and the spread of its rounds.

    Raises:
        CostsError: A time is not finite, or not above 0; the block is named.
    """
    seconds, spreads = np.zeros(len(blocks)), np.zeros(len(blocks))
    for number, block in enumerate(blocks):
        on = timings if block.degree == 1 else timings[: block.degree]
        rows = [rank.blocks[:, number] for rank in on]
        for row in rows:
            if not (np.isfinite(row).all() and (row > 0).all()):
                raise CostsError(
                    f"measured times of a block ({block.kind}, "
                    f"{len(block.lengths or block.rows)} samples, degree {block.degree}) "
                    f"are {row.tolist()}; expected finite seconds above 0. "
                    "Calibrate again; if it stays, look for a device that fails"
                )
        seconds[number] = np.mean([np.median(row) for row in rows])
        spreads[number] = np.mean([spread_of(row) for row in rows])
    return seconds, spreads


def fit(table: SampleTable, blocks: Sequence[Block], seconds: FloatArray) -> Found:
    """Coefficients of 0 or more that describe the blocks of kinds `FITTED`.

    Args:
        table: All samples of the index.
        blocks: What was timed.
        seconds: (blocks,) from `medians`.
    """
    rows = [number for number, block in enumerate(blocks) if block.kind in FITTED]
    matrix = np.array([features(table, blocks[number]) for number in rows])
    found = Found(*robust_fit(matrix, seconds[rows]).tolist())
    if found.target and not found.pair:
        # The planner counts targets by pairs; without a price of those there is none of theirs.
        found = Found(*robust_fit(matrix[:, :-1], seconds[rows]).tolist())
    return found


def robust_fit(matrix: FloatArray, seconds: FloatArray) -> FloatArray:
    """Coefficients of 0 or more; far residuals weigh less, in proportion to how far they are.

    Args:
        matrix: (n, k) float64.
        seconds: (n,) float64, above 0.

    Returns:
        (k,) float64.
    """
    weights = np.ones(len(seconds))
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        found = non_negative_fit(matrix, seconds, weights)
        residual = np.abs(matrix @ found / seconds - 1)
        scale = max(float(np.median(residual)) * 1.4826, 1e-12)
        weights = np.minimum(1.0, OUTSIDE * scale / np.maximum(residual, 1e-12))
    return found


def non_negative_fit(matrix: FloatArray, seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """The least weighted sum of squared relative errors with coefficients of 0 or more.

    Tries every set of columns, so it is exact; meant for a handful of them.

    Args:
        matrix: (n, k) float64.
        seconds: (n,) float64, above 0.
        weights: (n,) float64, of the squares.

    Returns:
        (k,) float64.
    """
    k = matrix.shape[1]
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    root = np.sqrt(weights)
    scaled = matrix / seconds[:, None] / scale * root[:, None]
    best, least = np.zeros(k), float(np.square(root).sum())
    for size in range(1, k + 1):
        for columns in map(list, itertools.combinations(range(k), size)):
            part = np.linalg.lstsq(scaled[:, columns], root, rcond=None)[0]
            error = float(np.square(scaled[:, columns] @ part - root).sum())
            if part.min() >= 0 and error < least:
                best, least = np.zeros(k), error
                best[columns] = part
    found: FloatArray = best / scale
    return found


class Link(NamedTuple):
    """Messages between two ranks, by wall clock."""

    latency: float
    """Seconds of a message without content."""
    bytes_per_s: float
    """One way, while as much comes back."""


def link_of(timings: Sequence[Timings]) -> Link:
    """Latency and rate of messages, by robust least squares over their sizes; 0 and 1 without any.

    Raises:
        CostsError: A time is not finite, or not above 0.
    """
    messages = [message for rank in timings for message in rank.messages]
    if not messages:
        return Link(0.0, 1.0)
    seconds = np.array([message.seconds for message in messages])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise CostsError(
            f"measured times of messages are {seconds.tolist()}; expected finite seconds above 0. "
            "Calibrate again; if it stays, look for a link that fails"
        )
    matrix = np.array([(1.0, float(message.size)) for message in messages])
    latency, byte = robust_fit(matrix, seconds).tolist()
    return Link(latency, 1.0 / max(byte, 1e-15))


def costs_of(
    found: Found, shape: ModelShape, timings: Sequence[Timings], where: MeasuredOn
) -> Costs:
    """Fitted coefficients as a cost file, whose terms are FLOPs over rates.

    Args:
        found: From `fit`.
        shape: Of the model: layers and widths.
        timings: Of all ranks, for the closing pass and the optimizer.
        where: What they were measured on.

    Raises:
        CostsError: A time is not finite.
    """
    text, vision = shape.text, shape.vision
    width = text.heads * text.head_width
    per_layer = 2 * text.width * (width + text.kv_heads * text.head_width)
    parameters = float(text.layers * (per_layer + text.mlp_matrices * text.width * text.mlp_width))
    output = float(text.width * text.vocabulary)
    # Without a square, half a rate has no meaning: what is left is linear.
    linear = found.linear + (found.half if not found.pair else 0.0)
    encoder_layers, encoder_width = max(vision.layers, 1), max(vision.width, 1)
    unit_flops = 14.0 * encoder_layers * encoder_width / max(found.square, 1e-15)
    link = link_of(timings)
    for name, values in (
        ("closing pass", np.concatenate([rank.closing for rank in timings])),
        ("optimizer", np.concatenate([rank.optimizer for rank in timings])),
        ("copies to the host", np.array([rank.host_rate for rank in timings])),
        ("messages", np.array(link)),
    ):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise CostsError(
                f"measured times of {name} are {values.tolist()}; expected finite numbers of 0 or "
                "more. Calibrate again; if it stays, look for a device that fails"
            )
    ends = [float(np.median(rank.closing) + np.median(rank.optimizer)) for rank in timings]
    return Costs(
        name=f"{shape.name} on {where.hardware}",
        measured=True,
        measured_on=where,
        linear=LinearCosts(parameters=parameters, flops=6.0 * parameters / max(linear, 1e-12)),
        attention=AttentionCosts(
            layers=text.layers,
            hidden=width,
            flops=7.0 * text.layers * width / max(found.pair, 1e-15),
            half_rate_tokens=found.half / found.pair if found.pair else 0.0,
        ),
        output=OutputCosts(
            parameters=output if found.target else 0.0,
            flops=8.0 * output / found.target if found.target else 1.0,
        ),
        exchange=ExchangeCosts(
            layers=text.layers,
            latency=found.hop / text.layers,
            bytes_per_s_in_node=link.bytes_per_s,
            bytes_per_s_across=link.bytes_per_s,
        ),
        host=HostCosts(bytes_per_s=min(rank.host_rate for rank in timings)),
        encoder=EncoderCosts(
            parameters=found.encoder * unit_flops / 6.0,
            layers=encoder_layers,
            hidden=encoder_width,
            flops=unit_flops,
        ),
        fixed=FixedCosts(microbatch=found.fixed),
        step=StepCosts(closing_step=max(ends), closing_microbatch=max(ends)),
    )
