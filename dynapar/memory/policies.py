"""What backward may compute again, or fetch from the host, and what that costs in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple, cast, get_args

from dynapar.costs import Costs
from dynapar.errors import ConfigError

Policy = Literal["none", "selective", "full", "offload"]
"""What a microbatch keeps for backward: everything; each layer's input and what attention gave;
each layer's input; nothing on the device, with each layer's input on the host."""
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""From the most bytes and the least time to the least bytes and the most time."""


ASSUMED_HOST_RATE = 25e9
"""Bytes per second between device and host, one way, where none was measured: PCIe 4.0 x16."""


class Repeated(NamedTuple):
    """Shares of forward and backward time that a policy adds."""

    linear: float
    attention: float
    exchange: float


REPEATED: Mapping[Policy, Repeated] = MappingProxyType(
    {
        "none": Repeated(0.0, 0.0, 0.0),
        "selective": Repeated(1 / 3, 0.0, 0.0),
        "full": Repeated(1 / 3, 1 / 3.5, 1 / 3),
        "offload": Repeated(1 / 3, 1 / 3.5, 1 / 3),
    }
)
"""A forward pass once more: 2 of the 6 FLOPs of a weight, 1 of attention's 3.5, and 1 of the 3
passes of keys and values, as the cost file's own formulas count them. "selective" keeps what
attention gave, and so repeats neither it nor its exchange."""


def costs_under(
    costs: Costs,
    policy: Policy,
    *,
    token_bytes: float = 0.0,
    encoder_token_bytes: float = 0.0,
    host_bytes_per_s: float = ASSUMED_HOST_RATE,
    encoder_trained: bool = True,
) -> Costs:
    """The costs of microbatches that run under a policy.

    The name stays: a plan is of one cost file, whatever its microbatches recompute. No coefficient
    falls from a policy to the next one of `POLICIES`, so that a bound under "none" bounds all.

    Args:
        costs: Of microbatches that keep everything.
        policy: The policy.
        token_bytes: That an LLM token sends to the host under "offload"; they come back, too.
        encoder_token_bytes: The same of an encoder token.
        host_bytes_per_s: Between device and host, one way; nothing hides it.
        encoder_trained: A frozen encoder keeps nothing and so repeats nothing.
    """
    more = REPEATED[policy]
    if policy == "none":
        return costs
    linear, attention, exchange = costs.linear, costs.attention, costs.exchange
    wait = token_bytes * 2 / host_bytes_per_s if policy == "offload" else 0.0
    encoder = costs.encoder
    if encoder_trained:
        again = (1 + more.linear) / (1 + more.attention)
        pause = encoder_token_bytes * 2 / host_bytes_per_s if policy == "offload" else 0.0
        flops = encoder.flops / (1 + more.attention)
        encoder = replace(
            encoder, flops=flops, parameters=encoder.parameters * again + pause * flops / 6
        )
    return replace(
        costs,
        linear=replace(
            linear, parameters=linear.parameters * (1 + more.linear) + wait * linear.flops / 6
        ),
        attention=replace(attention, flops=attention.flops / (1 + more.attention)),
        exchange=replace(
            exchange,
            passes=exchange.passes * (1 + more.exchange),
            latency=exchange.latency * (1 + more.exchange),
        ),
        encoder=encoder,
    )


def transfer_price(costs: Costs) -> str:
    """Where the price of "offload" comes from, in words."""
    if costs.host is not None:
        return f"offload is priced by {costs.host.bytes_per_s / 1e9:.3g} GB/s, as measured"
    return (
        f"offload is priced by {ASSUMED_HOST_RATE / 1e9:.0f} GB/s, which is assumed: dynapar "
        "calibrate measures it"
    )


def parse_policies(names: str | Iterable[str]) -> tuple[Policy, ...]:
    """Policies by name, in the order of `POLICIES`, each once.

    Args:
        names: Names, or a text with commas between them.

    Raises:
        ConfigError: A name is unknown, or there is none.
    """
    given = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    if unknown := [name for name in given if name not in POLICIES]:
        raise ConfigError(
            f"recompute is {unknown[0]!r}; expected some of {', '.join(POLICIES)}, with commas "
            "between"
        )
    if not given:
        raise ConfigError(f"recompute names no policy; expected some of {', '.join(POLICIES)}")
    return tuple(policy for policy in POLICIES if policy in cast(list[Policy], given))
