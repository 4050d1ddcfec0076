"""What one rank can hold in a microbatch, as the planner and a plan's reader count it.

The peak of a microbatch is reached in one of a few moments: in the loss, in the last layer's
backward, in the encoder's. In each of them the bytes grow linearly with the rank's tokens and
encoder tokens, so that the peak is the largest of a few linear `Piece`s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynapar.memory.policies import ASSUMED_HOST_RATE, Policy

IntArray = npt.NDArray[np.int64]

UNLIMITED = 1 << 40
"""Tokens where bytes set no limit."""


class Piece(NamedTuple):
    """Bytes at one moment: fixed + token * tokens + encoder_token * encoder tokens."""

    fixed: int
    token: int
    encoder_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLimits:
    """What fits under one policy."""

    policy: Policy
    pieces: tuple[Piece, ...]
    """Of each moment that may be the peak, states included."""
    capacity: int
    """LLM tokens of one rank in a microbatch."""
    encoder_capacity: int
    """Encoder tokens of one rank in a microbatch; a rank that is full of both fits the budget."""
    host_token: int = 0
    """Bytes that an LLM token sends to the host."""
    host_encoder_token: int = 0
    """Bytes that an encoder token sends to the host."""

    def peak(self, tokens: IntArray, encoder_tokens: IntArray) -> IntArray:
        """Bytes of ranks with these loads.

        Args:
            tokens: (S,) int64.
            encoder_tokens: (S,) int64.
        """
        moments = [
            piece.fixed + piece.token * tokens + piece.encoder_token * encoder_tokens
            for piece in self.pieces
        ]
        peak: IntArray = np.max(moments, axis=0)
        return peak

    def room(self, budget: int, encoder_tokens: int) -> int:
        """LLM tokens of a rank that fit beside so many encoder tokens; below 0 where none do.

        Args:
            budget: Bytes of the rank.
            encoder_tokens: That the rank encodes.
        """
        return min(
            _room(budget - piece.fixed - piece.encoder_token * encoder_tokens, piece.token)
            for piece in self.pieces
        )


def _room(left: int, token: int) -> int:
    """Tokens that fit into what is left; without limit where a moment needs none for them."""
    if left < 0:
        return -1
    return left // token if token > 0 else UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """A budget of bytes, and what fits into it under each policy that may be used."""

    budget: int
    """Bytes of one rank that plans may fill: the device's, less what is kept free."""
    policies: tuple[PolicyLimits, ...]
    """In the order of `POLICIES`, 1 or more."""
    host_bytes_per_s: float = ASSUMED_HOST_RATE
    """Between device and host, one way, as "offload" is priced."""
    encoder_trained: bool = True
    """Whether the encoder keeps activations that a policy can save."""

    @property
    def capacity(self) -> int:
        """LLM tokens under the policy that holds most."""
        return max(limits.capacity for limits in self.policies)

    @property
    def encoder_capacity(self) -> int:
        """Encoder tokens under the policy that holds most."""
        return max(limits.encoder_capacity for limits in self.policies)

    def without_media(self) -> MemoryLimits:
        """The same budget for a step in which nothing is encoded: all of it is for LLM tokens."""
        policies = tuple(
            replace(limits, capacity=limits.room(self.budget, 1), encoder_capacity=1)
            for limits in self.policies
        )
        return replace(self, policies=policies)
