"""What a peer is given, and what it gives back.

A peer decides which samples run together, on which ranks, and in which order. Both sides of that
are plain arrays and tuples, since peers run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynapar.errors import DynaparError
from dynapar.packing.ticks import Coefficients, FloatArray, IntArray


class PeerError(DynaparError, RuntimeError):
    """A peer made no plan, or one that could not run; the message is the reason."""


class PeerMissingError(DynaparError, RuntimeError):
    """A peer is not installed, or its installed package lacks what is called; says what to do."""


class Request(NamedTuple):
    """One step of n samples."""

    tokens: IntArray
    """(n,) LLM tokens: all that "megatron" and "verl" look at."""
    reach: FloatArray
    """(n,) their reach (`packing.ticks`); the tokens, but for trees."""
    unit_offsets: IntArray
    """(n + 1,) where each sample's encoder units begin."""
    unit_tokens: IntArray
    """(units,) encoder tokens of each unit."""
    ranks: int
    node: int
    """Ranks of a node."""
    capacity: int
    """LLM tokens of a rank in a microbatch."""
    encoder_capacity: int
    """Encoder tokens of a rank in a microbatch."""
    constants: Coefficients
    """What work costs; "dhp" and "entrain" plan with it, as if their profiles were perfect."""
    lockstep: bool
    """Whether ranks meet in waves, whose LLM part lasts at least as long as its traffic."""
    degree: int
    """Of all samples, where a peer has one degree for the whole run; else 0."""


class Piece(NamedTuple):
    """One microbatch of a peer's plan."""

    wave: int
    """Microbatches of one wave run side by side; a rank takes its own in ascending order."""
    ranks: tuple[int, ...]
    """All of them share every sample of the microbatch."""
    rows: tuple[int, ...]
    """Its samples, in packing order."""


Plan = list[Piece]
"""In ascending order of waves."""


class Reply(NamedTuple):
    """What comes back from the process in which a peer runs."""

    plan: Plan | None
    """None where there is none."""
    reason: str
    """Why there is none."""
    seconds: float
    """CPU time of planning."""


Planner = Callable[[Request], Plan]
"""Raises `PeerError` where it makes no plan."""
