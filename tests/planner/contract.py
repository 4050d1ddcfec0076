"""What every plan owes, derived anew in plain Python from the plan's records."""

from __future__ import annotations

from dynapar.cluster import Cluster
from dynapar.plan import StepPlan
from dynapar.planner import PlannerConfig


def cut(tokens: int, degree: int) -> list[int]:
    """Tokens on each rank: chunks j and 2 * degree - 1 - j of 2 * degree."""
    edge = [k * tokens // (2 * degree) for k in range(2 * degree + 1)]
    size = [edge[k + 1] - edge[k] for k in range(2 * degree)]
    return [size[j] + size[-1 - j] for j in range(degree)]


def is_window(ranks: tuple[int, ...], cluster: Cluster) -> bool:
    """Consecutive: in one node, or whole half nodes."""
    node, half, width = cluster.ranks_per_node, cluster.half_node, len(ranks)
    if ranks != tuple(range(ranks[0], ranks[0] + width)) or ranks[-1] >= cluster.ranks:
        return False
    if width <= node:
        return ranks[0] // node == ranks[-1] // node
    return ranks[0] % half == 0 and width % half == 0


def run(plan: StepPlan) -> list[int]:
    """Run all queues, each microbatch once it is first in all of its ranks' queues."""
    queues = [[entry for entry in queue if entry is not None] for queue in plan.queues]
    done: list[int] = []
    while any(queues):
        ready = [
            number
            for number, micro in enumerate(plan.microbatches)
            if all(queues[rank][:1] == [number] for rank in micro.ranks)
        ]
        assert ready, f"ranks wait for each other: {queues}"
        for number in ready:
            for rank in plan.microbatches[number].ranks:
                queues[rank].pop(0)
        done += ready
    return done


def hold(plan: StepPlan, cluster: Cluster, config: PlannerConfig) -> None:
    """Assert all of it."""
    seen = [place.sample for micro in plan.microbatches for place in micro.placements]
    assert sorted(seen) == list(range(len(plan.samples)))
    peers: dict[int, set[int]] = {rank: set() for rank in range(cluster.ranks)}
    for micro in plan.microbatches:
        assert is_window(micro.ranks, cluster)
        tokens = dict.fromkeys(micro.ranks, 0)
        encoded = dict.fromkeys(micro.ranks, 0)
        for place in micro.placements:
            assert is_window(place.ranks, cluster)
            length = int(plan.samples.llm_tokens[place.sample])
            for rank, share in zip(place.ranks, cut(length, len(place.ranks)), strict=True):
                tokens[rank] += share
            units = plan.samples.units(place.sample).tolist()
            for rank, size in zip(place.encoders, units, strict=True):
                encoded[rank] += size
        assert micro.tokens_per_rank == tuple(tokens.values())
        assert max(tokens.values()) <= config.capacity
        assert max(encoded.values()) <= config.encoder_capacity
        for rank in micro.ranks:
            peers[rank] |= set(micro.ranks) - {rank}
    if config.peer_budget is not None:
        assert max(map(len, peers.values())) <= config.peer_budget
    for rank, queue in enumerate(plan.queues):
        own = [n for n, micro in enumerate(plan.microbatches) if rank in micro.ranks]
        assert [entry for entry in queue if entry is not None] == own
    assert sorted(run(plan)) == list(range(len(plan.microbatches)))
    if config.sync == "microbatch":
        assert len({len(queue) for queue in plan.queues}) == 1
        for number, micro in enumerate(plan.microbatches):
            assert len({plan.queues[rank].index(number) for rank in micro.ranks}) == 1
    assert plan.lower_bound <= plan.makespan
    assert plan.optimal or plan.lower_bound < plan.makespan
