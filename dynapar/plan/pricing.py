"""Price the microbatches of a layout, each under its own recompute policy."""

from __future__ import annotations

import numpy as np

from dynapar.costs import Costs, coefficients
from dynapar.memory.limits import MemoryLimits
from dynapar.memory.policies import POLICIES, Policy, costs_under
from dynapar.meta import IntArray, SampleTable
from dynapar.packing.ticks import Layout, Loads, microbatch_ticks


def policy_costs(costs: Costs, policy: Policy, memory: MemoryLimits | None) -> Costs:
    """The costs of microbatches under a policy, as a plan with this budget prices them.

    Args:
        costs: Of microbatches that keep everything.
        policy: The policy.
        memory: The plan's budget; None: nothing is known of what goes to the host.
    """
    if memory is None:
        return costs_under(costs, policy)
    own = next((limits for limits in memory.policies if limits.policy == policy), None)
    return costs_under(
        costs,
        policy,
        token_bytes=own.host_token if own else 0,
        encoder_token_bytes=own.host_encoder_token if own else 0,
        host_bytes_per_s=memory.host_bytes_per_s,
        encoder_trained=memory.encoder_trained,
    )


def price_layout(
    layout: Layout,
    samples: SampleTable,
    costs: Costs,
    *,
    ranks_per_node: int,
    recompute: IntArray,
    memory: MemoryLimits | None = None,
) -> Loads:
    """What every rank of every microbatch has to do, forward, backward and again.

    Args:
        layout: The microbatches.
        samples: The step's samples.
        costs: Of microbatches that keep everything.
        ranks_per_node: Degrees above this pay the bandwidth between nodes.
        recompute: (B,) policies, by their place in `POLICIES`.
        memory: The plan's budget.

    Raises:
        CostsError: A coefficient is too large to be counted with.
    """
    tokens = np.array(samples.llm_tokens, np.int64)
    offsets = np.array(samples.unit_offsets, np.int64)
    units = np.array(samples.unit_tokens, np.int64)
    owner = np.repeat(np.arange(len(layout.width)), layout.width)
    whole: Loads | None = None
    for number in np.unique(recompute).tolist() or [0]:
        own = policy_costs(costs, POLICIES[number], memory)
        constants = coefficients(own, ranks_per_node=ranks_per_node)
        reach = samples.reach_under(own)
        loads: Loads = microbatch_ticks(layout, tokens, reach, offsets, units, constants)
        if whole is None:
            whole = loads
            continue
        here = recompute == number
        whole.ticks[here] = loads.ticks[here]
        whole.slowest[here] = loads.slowest[here]
        whole.parts[here[owner]] = loads.parts[here[owner]]
    assert whole is not None
    return whole
