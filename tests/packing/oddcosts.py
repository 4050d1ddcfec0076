"""Cost files that make one part of the work dear, or the only one."""

from __future__ import annotations

from dataclasses import replace

from dynapar.costs import Costs, load_costs

REFERENCE = load_costs(None)
FREE = replace(REFERENCE, name="free", sharded=replace(REFERENCE.sharded, llm_bytes=0.0))
"""Without the traffic floor, which would hide all else of so small a step."""
DEAR_LINKS = replace(
    FREE,
    name="links",
    exchange=replace(FREE.exchange, latency=3e-5, bytes_per_s_in_node=1e11, bytes_per_s_across=1e9),
)
DEAR_FIXED = replace(FREE, name="fixed", fixed=replace(FREE.fixed, microbatch=0.3))
DEAR_ENCODER = replace(FREE, name="encoder", encoder=replace(FREE.encoder, flops=5e12))
LINEAR = replace(
    FREE,
    name="linear",
    attention=replace(FREE.attention, hidden=0),
    exchange=replace(FREE.exchange, kv_bytes_per_token=0, latency=0.0),
)
ATTENTION = replace(
    FREE,
    name="attention",
    linear=replace(FREE.linear, flops=1e18),
    attention=replace(FREE.attention, half_rate_tokens=0.0),
)
"""Rounding is not covered by growth here."""
ALL: tuple[Costs, ...] = (
    REFERENCE, FREE, load_costs("harder"), DEAR_LINKS, DEAR_FIXED, DEAR_ENCODER, LINEAR, ATTENTION,
)  # fmt: skip
