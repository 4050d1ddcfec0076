"""A budget of bytes in a plan's JSON form, which version 2 has and version 1 lacks."""

from __future__ import annotations

from typing import cast

from dynapar.memory.limits import MemoryLimits, Piece, PolicyLimits
from dynapar.memory.policies import POLICIES, Policy
from dynapar.plan.schema import Json, Schema

_PIECE = ("fixed", "token", "encoder_token")
_COUNTS = ("capacity", "encoder_capacity", "host_token", "host_encoder_token")


def memory_to_json(memory: MemoryLimits | None) -> Json:
    """The budget and its policies; null without a budget."""
    if memory is None:
        return None
    return {
        "budget": memory.budget,
        "host_bytes_per_s": memory.host_bytes_per_s,
        "encoder_trained": memory.encoder_trained,
        "policies": [
            {
                "policy": limits.policy,
                **{name: getattr(limits, name) for name in _COUNTS},
                "pieces": [dict(zip(_PIECE, piece, strict=True)) for piece in limits.pieces],
            }
            for limits in memory.policies
        ],
    }


def memory_from_json(values: Json) -> MemoryLimits | None:
    """What `memory_to_json` wrote, of a form that is known to be whole."""
    if values is None:
        return None
    found = cast(dict[str, Json], values)
    policies = []
    for each in cast(list[dict[str, Json]], found["policies"]):
        pieces = cast(list[dict[str, int]], each["pieces"])
        policies.append(
            PolicyLimits(
                policy=cast(Policy, each["policy"]),
                pieces=tuple(Piece(*(piece[name] for name in _PIECE)) for piece in pieces),
                **{name: int(cast(int, each[name])) for name in _COUNTS},
            )
        )
    return MemoryLimits(
        budget=int(cast(int, found["budget"])),
        policies=tuple(policies),
        host_bytes_per_s=float(cast(float, found["host_bytes_per_s"])),
        encoder_trained=found["encoder_trained"] is True,
    )


MEMORY: Schema = {
    "budget": "integer",
    "host_bytes_per_s": "number",
    "encoder_trained": "boolean",
    "policies": [
        {
            "policy": frozenset(POLICIES),
            **dict.fromkeys(_COUNTS, "integer"),
            "pieces": [dict.fromkeys(_PIECE, "integer")],
        }
    ],
}
"""The schema of a budget that is there."""
