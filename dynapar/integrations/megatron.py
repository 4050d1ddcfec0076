"""dynapar in the place of the schedulers of Megatron Core's dynamic context parallelism.

Megatron makes groups of 2, 4, ... ranks, aligned to their size, when it starts, and lets its
scheduler say which of them runs which samples. The classes here take the same arguments and give
the same lists, so that assigning one to its original's name is all there is to do; every rank
computes the same lists. They need neither torch nor Megatron.

- `BalancedCPScheduler`: of release 0.16, "hybrid context parallelism". A group of the schedule is
  what ranks run between two barriers; each rank runs its samples one by one.
- `DefaultDynamicCPScheduler`: of the development branch, which verl uses too. Each entry of the
  schedule is one packed microbatch of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynapar.cluster import Cluster
from dynapar.costs import Costs
from dynapar.errors import ConfigError
from dynapar.integrations.lengths import model_costs, plan_lengths
from dynapar.plan import StepPlan

IdLengths = Sequence[tuple[int, int]]
"""Each sample's id and its tokens, padding included."""
PerRank = list[list[int]]
"""For each rank, ids or lengths in the order in which it runs them."""

HIDDEN, LAYERS = 4096, 32
"""Of a 7B model: where the model's own are not known."""


class Group(Protocol):
    """What is read of a process group."""

    def size(self) -> int:
        """Its ranks."""
        ...


class BalancedCPScheduler:
    """As `megatron.core.pipeline_parallel.hybrid_cp_schedule.BalancedCPScheduler`."""

    def __init__(
        self,
        max_seq_len_per_rank: int,
        dp_cp_group: Group,
        *,
        costs: Costs | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        """As the original; what follows the group is dynapar's own.

        Args:
            max_seq_len_per_rank: Tokens that one rank may hold.
            dp_cp_group: The ranks of data and context parallelism together.
            costs: What work costs; None for what the width and depth of the model suggest.
            ranks_per_node: Ranks of `dp_cp_group` that share a node; None for all of them.

        Raises:
            ConfigError: Its ranks are not whole nodes.
        """
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.total_hdp_gpus = dp_cp_group.size()
        self.costs = costs
        self.cluster = _cluster(self.total_hdp_gpus, ranks_per_node)

    def get_groups_and_subsamples(
        self, sample_id_seqlens: IdLengths, config: object
    ) -> tuple[list[PerRank], list[PerRank]]:
        """Deal samples to ranks.

        Within a group of the schedule no rank changes its process group, and every rank has work.

        Args:
            sample_id_seqlens: The samples of the global batch; ids are unique.
            config: Megatron's; `hidden_size` and `num_layers` are read where it has them.

        Returns:
            For each group of the schedule, for each rank, the lengths of its samples; and the same
            with ids. The ranks that list a sample share it.

        Raises:
            SampleError: A length is below 1.
            PlanError: A sample is too long for all ranks, or there are too few samples.
        """
        if not sample_id_seqlens:
            return [], []
        plan = _plan(
            sample_id_seqlens, self.cluster, self.max_seq_len_per_rank, self.costs or _costs(config)
        )
        lengths = [length for _, length in sample_id_seqlens]
        groups: dict[tuple[int, ...], PerRank] = {}
        for tiling, rows in _waves(plan):
            group = groups.setdefault(tiling, [[] for _ in range(self.cluster.ranks)])
            for own, more in zip(group, rows, strict=True):
                own += more
        return (
            [[[lengths[row] for row in rows] for rows in group] for group in groups.values()],
            [_named(group, sample_id_seqlens) for group in groups.values()],
        )


class DefaultDynamicCPScheduler:
    """As `megatron.core.datasets.data_schedule.DefaultDynamicCPScheduler`, as verl calls it.

    Megatron's own class also moves the data: there, assign `get_groups_and_subsamples` alone.
    """

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None = None,
    ) -> None:
        """As the original.

        Args:
            max_seqlen_per_dp_cp_rank: Tokens that one rank may hold in one microbatch.
            cp_size: Ranks of context parallelism.
            dp_size: Ranks of data parallelism.
            microbatch_group_size_per_vp_stage: Only None: the count of microbatches is as it comes.
        """
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size = cp_size
        self.dp_size = dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage

    def get_groups_and_subsamples(self, sample_id_seqlens: IdLengths) -> list[PerRank]:
        """`get_groups_and_subsamples` of this scheduler."""
        return get_groups_and_subsamples(self, sample_id_seqlens)


class PackingScheduler(Protocol):
    """What is read of a scheduler of the development branch."""

    max_seqlen_per_dp_cp_rank: int
    cp_size: int
    dp_size: int
    microbatch_group_size_per_vp_stage: int | None


def get_groups_and_subsamples(
    self: PackingScheduler, sample_id_seqlens: IdLengths
) -> list[PerRank]:
    """Deal samples to microbatches and ranks, as a method of a scheduler.

    Args:
        self: The scheduler.
        sample_id_seqlens: The samples of the global batch; ids are unique.

    Returns:
        For each microbatch, for each rank, the ids of its samples. The ranks that list the same
        ids are consecutive, 1, 2, 4, ... of them, aligned to their number, and share all of them;
        no rank is without one, and none holds more than `max_seqlen_per_dp_cp_rank` tokens.

    Raises:
        ConfigError: The scheduler is to cap or group what dynapar does not.
        SampleError: A length is below 1.
        PlanError: A sample is too long for all ranks, or there are too few samples.
    """
    for name, wanted in (
        ("microbatch_group_size_per_vp_stage", None),
        ("max_num_seqs", None),
        ("min_cp_size", 1),
    ):
        if (value := getattr(self, name, wanted)) != wanted:
            raise ConfigError(
                f"{name} is {value!r}; expected {wanted!r}, since dynapar cannot keep to it. Leave "
                f"it out, or keep Megatron's own scheduler"
            )
    if not sample_id_seqlens:
        return []
    cluster = _cluster(self.dp_size * self.cp_size, None)
    plan = _plan(sample_id_seqlens, cluster, self.max_seqlen_per_dp_cp_rank, _costs(None))
    return [_named(rows, sample_id_seqlens) for _, rows in _waves(plan)]


def _cluster(ranks: int, ranks_per_node: int | None) -> Cluster:
    node = ranks if ranks_per_node is None else ranks_per_node
    if node < 1 or ranks < 1 or ranks % node:
        raise ConfigError(
            f"{ranks} ranks of data and context parallelism are not whole nodes of {node}; give "
            f"the ranks of one node that are among them"
        )
    return Cluster(nodes=ranks // node, ranks_per_node=node)


def _costs(config: object) -> Costs:
    hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_layers", None)
    return model_costs(hidden=hidden or HIDDEN, layers=layers or LAYERS)


def _plan(samples: IdLengths, cluster: Cluster, capacity: int, costs: Costs) -> StepPlan:
    """A plan whose rings are groups that Megatron has."""
    ranks = cluster.ranks
    largest = ranks
    if ranks & (ranks - 1):
        # Beside that of all ranks it makes groups of up to half of the last power of two.
        largest = max(1, 1 << (ranks.bit_length() - 2))
    return plan_lengths(
        [length for _, length in samples],
        cluster=cluster,
        capacity=capacity,
        costs=costs,
        sync="microbatch",
        degrees="pow2",
        windows="aligned",
        equal_counts=True,
        peer_budget=None,
        max_degree=largest,
    )


def _waves(plan: StepPlan) -> list[tuple[tuple[int, ...], PerRank]]:
    """For each wave the first ranks of its rings, and for each rank its rows of the samples."""
    waves = []
    for index in range(len(plan.queue(0))):
        firsts, rows = [], []
        for rank in range(plan.ranks):
            number = plan.queues[rank][index]
            if number is None:
                raise AssertionError("a plan of equal counts has a dummy")
            micro = plan.microbatch(number)
            firsts.append(micro.ranks[0])
            rows.append([place.sample for place in micro.placements])
        waves.append((tuple(firsts), rows))
    return waves


def _named(rows: PerRank, samples: IdLengths) -> PerRank:
    return [[samples[row][0] for row in own] for own in rows]
