"""Make the parts of a run from its configuration: what train, verify and the demo share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from dynapar.attention.exchange import Transport
from dynapar.attention.pooled import RingTransport, make_pool
from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.control import control_group
from dynapar.costs import Costs
from dynapar.errors import ConfigError, ModelError
from dynapar.meta import SampleTable
from dynapar.plan import StepPlan
from dynapar.planner import (
    PlannerConfig,
    group_by_prefix,
    homogeneous_plan,
    plan_step,
    random_plan,
)
from dynapar.rings import allowed_degrees, first_ranks, windows
from dynapar.runtime.adapter import Adapter
from dynapar.runtime.executor import StepExecutor
from dynapar.runtime.order import OrderLog
from dynapar.runtime.reference import Widening
from dynapar.schemes import Schemes, describe
from dynapar.train.config import OptimizerSection, Precision, RunConfig, Scheduler, memory_of

Planner = Callable[[SampleTable, int], StepPlan]
"""(the step's samples, step) -> its plan; the same on every rank."""

Window = tuple[int, int]
"""First rank, and number of ranks."""

MOST_GROUPS = 64
"""Process groups of the exchanges that one rank may be in: each holds memory of its device, or
sockets, on all its ranks as long as the run lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank's view of all ranks, and the groups that it shares with them.

    Gradients are reduced over the default group. Exchanges and the control plane have groups of
    their own, on which nothing else runs.
    """

    rank: int
    ranks: int
    device: torch.device
    transport: RingTransport
    control: dist.ProcessGroup | None
    """A gloo group; None when there is one rank."""
    log: OrderLog


def pick_device() -> torch.device:
    """The GPU of this process's place on its machine, or the CPU where there is no GPU.

    Raises:
        ConfigError: The machine has GPUs, but fewer than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= gpus:
        raise ConfigError(
            f"rank {place} of this machine has no GPU of its own, the machine has {gpus}; expected "
            "one a rank. Start fewer ranks, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPU"
        )
    return torch.device("cuda", place)


def join_ranks(
    *,
    timeout: timedelta,
    device: torch.device | None = None,
    pool: Callable[[int], Sequence[Window]] | None = None,
) -> Ranks:
    """Meet the other ranks and make the groups of a run; a collective call.

    Where torch.distributed is not initialised yet, joins by torchrun's environment variables, or
    stays alone without them.

    Args:
        timeout: Longest wait for another rank.
        device: Of this rank; None for `pick_device`.
        pool: (ranks) -> the windows that get process groups of their own for the exchanges; None
            is one group for all.
    """
    device = pick_device() if device is None else device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = "RANK" not in os.environ
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
            rank=0 if alone else -1,
            world_size=1 if alone else -1,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    log = OrderLog(rank=dist.get_rank())
    transport: RingTransport
    if pool is None:
        transport = Transport(dist.new_group(timeout=timeout), recorder=log)
    else:
        transport = make_pool(pool(dist.get_world_size()), recorder=log, timeout=timeout)
    transport.warm_up(device)
    return Ranks(
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        device=device,
        transport=transport,
        control=control_group(timeout) if dist.get_world_size() > 1 else None,
        log=log,
    )


def load_model(
    folder: Path,
    *,
    seed: int,
    precision: Precision = "float32",
    recompute: bool = False,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """The model of a folder, in training mode, equal on all ranks.

    Args:
        folder: With config.json; weights are those of its safetensors files or, where it has
            none, random ones drawn from `seed`.
        seed: Of random weights.
        precision: "float64" makes parameters float64, all else float32.
        recompute: Recompute the layers' activations in backward.
        device: Where to put it; None is the CPU.

    Raises:
        ModelError: The folder has no readable config.json, or its model class is unknown.
    """
    model_class = _model_class(folder)
    if any(folder.glob("*.safetensors")):
        model = model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    else:
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = model_class._from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    if recompute:
        # The name that transformers has from 5.20 on, and the one before.
        new = getattr(model, "activation_checkpointing_enable", None)
        (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
    dtype = torch.float64 if precision == "float64" else torch.float32
    nn.Module.to(model, device, dtype)
    model.train()
    return model


def _model_class(folder: Path) -> type[PreTrainedModel]:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"no model in {folder}: {reason}. Expected a folder with transformers' config.json"
        ) from error
    names = config.architectures or []
    found = getattr(transformers, names[0], None) if names else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise ModelError(
            f"{folder}/config.json: architectures is {names}; expected one class of transformers "
            f"{transformers.__version__}, such as ['Qwen2_5_VLForConditionalGeneration']"
        )
    return found


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """What the executor and the reference step take as `autocast`."""
    return torch.bfloat16 if precision == "bfloat16" else None


def numerics(precision: Precision) -> AbstractContextManager[object]:
    """Under which forward passes run: float64 widens the model's float32 islands."""
    return Widening() if precision == "float64" else nullcontext()


def make_cluster(config: RunConfig, ranks: int) -> Cluster:
    """All ranks as nodes of `config.ranks_per_node`.

    Raises:
        ConfigError: The ranks do not fill whole nodes.
    """
    per_node = config.ranks_per_node or ranks
    if ranks % per_node:
        raise ConfigError(
            f"{ranks} ranks are no multiple of ranks_per_node {per_node}; expected whole nodes. "
            "Start another number of ranks, or leave ranks_per_node out for one node"
        )
    return Cluster(nodes=ranks // per_node, ranks_per_node=per_node)


def make_planner(config: RunConfig, *, costs: Costs, ranks: int) -> Planner:
    """The planner that the configuration asks for.

    Raises:
        ConfigError: The ranks do not fill whole nodes.
    """
    section = config.planner
    plans: dict[Scheduler, Callable[..., StepPlan]] = {
        "dynamic": plan_step,
        "homogeneous": partial(homogeneous_plan, degree=section.degree),
        "random": partial(random_plan, seed=config.seed),
    }
    plan = partial(
        plans[section.scheduler],
        cluster=make_cluster(config, ranks),
        costs=costs,
        config=planner_config(config),
    )
    return lambda samples, step: plan(group_samples(config, samples, ranks=ranks), step=step)


def group_samples(config: RunConfig, samples: SampleTable, *, ranks: int) -> SampleTable:
    """A step's samples as the configuration groups them.

    Raises:
        PlanError: A sample of a prefix fits no number of these ranks.
    """
    if config.batch.group_by is None:
        return samples
    return group_by_prefix(
        samples, cluster=make_cluster(config, ranks), config=planner_config(config)
    )


def planner_config(config: RunConfig) -> PlannerConfig:
    """The part of a run's configuration that the planner reads."""
    section = config.planner
    return PlannerConfig(
        capacity=section.capacity,
        encoder_capacity=section.encoder_capacity,
        memory=memory_of(config),
        sync=section.sync,
        gate=section.gate,
        noise=section.noise,
        max_degree=section.max_degree,
        degrees=section.degrees,
        windows=section.windows,
        peer_budget=section.peer_budget,
        equal_counts=section.equal_counts,
    )


def pool_of(config: RunConfig) -> Callable[[int], Sequence[Window]] | None:
    """What `join_ranks` takes as `pool`: the windows that the configuration's rings may be."""
    return partial(pool_windows, config) if config.attention.pool else None


def pool_windows(config: RunConfig, ranks: int) -> tuple[Window, ...]:
    """The windows of two ranks or more of a run on so many ranks.

    Raises:
        ConfigError: One rank would be in more than `MOST_GROUPS` of them, or the ranks do not fill
            whole nodes.
    """
    found = windows(make_cluster(config, ranks), planner_config(config).rings)
    held = [0] * ranks
    for first, count in found:
        for rank in range(first, first + count):
            held[rank] += 1
    most = max(held)
    if most > MOST_GROUPS:
        raise ConfigError(
            f"attention.pool is true, and rank {held.index(most)} would be in {most} process "
            f"groups, one for each of the {len(found)} windows that a ring of {ranks} ranks may "
            f"be that hold it; expected at most {MOST_GROUPS}. Set planner.windows: aligned, "
            "degrees: pow2, a smaller max_degree or peer_budget, or pool: false"
        )
    return found


def make_schemes(config: RunConfig, *, costs: Costs | None, ranks: int) -> Schemes:
    """How the run's rings share attention.

    Args:
        config: Of the run.
        costs: By which the run is planned; None where none are known yet, and no price decides.
        ranks: Of the run.
    """
    return Schemes(
        rules=config.attention.rules,
        text=load_model_shape(str(config.model)).text,
        costs=costs,
        itemsize={"bfloat16": 2, "float32": 4, "float64": 8}[config.precision],
        ranks_per_node=make_cluster(config, ranks).ranks_per_node,
    )


def describe_attention(config: RunConfig, schemes: Schemes, *, ranks: int) -> list[str]:
    """In lines for people: which scheme each degree takes and why, and what the pool is."""
    cluster, rules = make_cluster(config, ranks), planner_config(config).rings
    rings = []
    for degree in allowed_degrees(cluster, rules):
        first = first_ranks(cluster, degree, rules)[0]
        rings.append(range(first, first + degree))
    lines = describe(schemes, rings, capacity=config.planner.capacity)
    if config.attention.pool:
        count = len(pool_windows(config, ranks))
        text = f"attention: a pool of {count} process groups, one for each window"
        lines.append(text)
    if config.planner.memory is not None and (
        config.attention.pool or config.attention.scheme in ("ulysses", "hybrid")
    ):
        lines.append(
            "attention: planner.memory counts the staged exchange on one group; what heads that "
            "are shared and a pool's groups take beside it is not counted"
        )
    return lines


def make_executor(
    model: PreTrainedModel, ranks: Ranks, config: RunConfig, *, costs: Costs | None = None
) -> StepExecutor:
    """Put a model on dynapar's attention and wrap it for training; a collective call.

    Args:
        model: Equal on all ranks.
        ranks: That run it.
        config: Of the run.
        costs: By which it is planned, and `auto` chooses how rings share attention; None while
            they are measured.

    Raises:
        ModelError: The model has media of an unknown family, or uses dropout.
    """
    return StepExecutor(
        Adapter(model),
        transport=ranks.transport,
        log=ranks.log,
        loss_chunk=config.loss_chunk,
        autocast=autocast_dtype(config.precision),
        recompute=config.precision != "float64",
        schemes=make_schemes(config, costs=costs, ranks=ranks.ranks),
    )


def make_optimizer(model: PreTrainedModel, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW over all trained parameters; vectors are not decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
