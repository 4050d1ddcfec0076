"""Show what several schedulers would make of a source's steps, side by side.

What `dynapar simulate` does, free of the command line's library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dynapar.catalog import load_model_shape
from dynapar.cluster import Cluster
from dynapar.console import Advance, Cell, progress, show_json, show_table
from dynapar.costs import Costs, load_costs
from dynapar.devices import costs_for
from dynapar.errors import ConfigError
from dynapar.memory_command import BudgetRequest, room_under_one
from dynapar.plan import Sync
from dynapar.planner import PlannerConfig
from dynapar.planning import PlanRequest, batches
from dynapar.rings import RingRules
from dynapar.simulate.compare import (
    ALL,
    OURS,
    Comparison,
    Row,
    Run,
    Scene,
    compare,
    rows,
    traffic_share,
)
from dynapar.simulate.noise import Noise
from dynapar.simulate.peers import PEERS
from dynapar.simulate.picture import draw_comparison

TIMES = ("scheduler", "degree", "step s", "makespan s", "gap %", "gain", "worst", "with closing")
"""Columns of the first table; "noisy s" and "tokens/s" follow."""
SWEEPS = ("ranks", "capacity", "batch")
"""What can be swept."""
RULED = 0.05
"""Share of waves ruled by traffic from which it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to compare."""

    request: PlanRequest
    schedulers: tuple[str, ...]
    noise: Noise | None

    def scene(self) -> Scene:
        """The steps, drawn or read."""
        request = self.request
        return Scene(
            batches=tuple(batches(request)),
            cluster=request.cluster,
            costs=request.costs,
            config=request.config,
            noise=self.noise,
        )

    def answer(self, advance: Advance = lambda done, total: None) -> Comparison:
        """Run all schedulers; `advance` hears how many of them are done."""
        return compare(self.scene(), self.schedulers, advance)

    def with_value(self, name: str, value: str) -> Question:
        """The same question with one number changed.

        Args:
            name: One of `SWEEPS`.
            value: NODESxRANKS for ranks, else a number.

        Raises:
            ConfigError: The value is not one of that kind.
        """
        request = self.request
        if name == "ranks":
            changed = replace(request, cluster=Cluster.parse(value))
            return replace(self, request=changed)
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--sweep {name} has {value!r}; expected whole numbers above 0")
        if name == "batch":
            return replace(self, request=replace(request, global_batch=int(value)))
        config = replace(request.config, capacity=int(value))
        return replace(self, request=replace(request, config=config))


def simulate_command(
    source: str,
    *,
    cluster: str,
    capacity: int | None = None,
    encoder_capacity: int | None = None,
    budget: BudgetRequest | None = None,
    sync: Sync = "step",
    global_batch: int,
    steps: int = 5,
    seed: int = 0,
    shuffle: bool = True,
    model: str | None = None,
    costs: Path | None = None,
    device: str | None = None,
    rings: RingRules | None = None,
    equal_counts: bool = False,
    group_by: str | None = None,
    compare: str = "all",
    draws: int = 64,
    slow: Sequence[str] = (),
    sweep: str | None = None,
    picture: Path | None = None,
    json: bool = False,
) -> None:
    """Compare schedulers on the steps of a source, and print tables.

    Args:
        source: As `PlanRequest.source`.
        cluster: NODESxRANKS, as "8x8".
        capacity: LLM tokens of a rank in a microbatch; None: the usual, or from the budget.
        encoder_capacity: Encoder tokens of a rank in a microbatch; None: likewise.
        budget: Of bytes, with one recompute policy, under which all schedulers run.
        sync: Where ranks meet.
        global_batch: Samples of a step.
        steps: How many steps.
        seed: Of the order of samples, and of the noise.
        shuffle: False for the source's own order.
        model: Folder or name of a model: for the sizes of a metadata file, and for `device`.
        costs: A cost file; None for the shipped reference, or for those of `device`.
        device: A device of the catalog, whose peak rates then give the costs of `model`.
        rings: Which rings may form; None for the defaults.
        equal_counts: As `PlannerConfig.equal_counts`.
        group_by: As `PlanRequest.group_by`; then every scheduler is given the trees.
        compare: "all", or names from `simulate.compare.SCHEDULERS` with commas between.
        draws: Of the noise; 0 for none.
        slow: RANK:FACTOR of ranks that are always slower.
        sweep: NAME=VALUE,VALUE,... with a name from `SWEEPS`: one row a value instead of tables.
        picture: Where to draw the comparison.
        json: Print JSON instead of tables.

    Raises:
        DynaparError: Something asked for is not possible; the message says what.
    """
    used, ranks, rules = _costs(costs, device, model), Cluster.parse(cluster), rings or RingRules()
    room = room_under_one(
        budget,
        model,
        cluster=ranks,
        sync=sync,
        rings=rules,
        capacity=capacity,
        encoder_capacity=encoder_capacity,
    )
    used = room.priced(used)
    request = PlanRequest(
        source=source,
        cluster=ranks,
        config=PlannerConfig(
            capacity=room.capacity,
            encoder_capacity=room.encoder_capacity,
            sync=sync,
            equal_counts=equal_counts,
            **asdict(rules),
        ),
        costs=used,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        shuffle=shuffle,
        model=model,
        group_by=group_by,
    )
    question = Question(
        request=request,
        schedulers=ALL if compare == "all" else tuple(compare.split(",")),
        noise=_noise(draws, seed, slow),
    )
    title = f"{source} on {cluster}, sync {sync}, {global_batch:,} samples a step, {_origin(used)}"
    if budget is not None and room.memory is not None:
        policy = room.memory.policies[0].policy
        title += f", recompute {policy} in {budget.memory}: {room.capacity:,} tokens a rank"
    if sweep is not None:
        if picture is not None:
            raise ConfigError("--picture draws one comparison; leave --sweep or --picture out")
        _show_sweep(question, sweep, title, json=json)
        return
    with progress(f"simulating {source}") as advance:
        found = question.answer(advance)
    if picture is not None:
        draw_comparison(found, picture, title=title)
    if json:
        show_json(_report(question, found))
    else:
        _show(found, title)
        if picture is not None:
            print(f"picture written to {picture}")


def _costs(path: Path | None, device: str | None, model: str | None) -> Costs:
    if device is None:
        return load_costs(path)
    if path is not None:
        raise ConfigError("both --costs and --device are given; expected one: leave the other out")
    if model is None:
        raise ConfigError(f"--device {device} needs to know what runs on it; name it by --model")
    return costs_for(load_model_shape(model), device)


def _noise(draws: int, seed: int, slow: Sequence[str]) -> Noise | None:
    pairs = []
    for text in slow:
        rank, _, factor = text.partition(":")
        try:
            pairs.append((int(rank), float(factor)))
        except ValueError:
            raise ConfigError(
                f"--slow is {text!r}; expected RANK:FACTOR, for example 3:1.2"
            ) from None
    if draws == 0 and pairs:
        return Noise(microbatch=0.0, rank=0.0, draws=1, seed=seed, slow=tuple(pairs))
    return Noise(draws=draws, seed=seed, slow=tuple(pairs)) if draws else None


def _origin(costs: Costs) -> str:
    return f"costs {costs.name} ({'measured' if costs.measured else 'not measured'})"


def _show(found: Comparison, title: str) -> None:
    table = list(rows(found))
    times = [*TIMES, *(name for name in ("noisy s", "tokens/s") if name in table[0])]
    show_table(title, [{name: row[name] for name in times} for row in table])
    rest = [name for name in table[0] if name not in times[1:]]
    print()
    show_table("where rank time goes", [{name: row[name] for name in rest} for row in table])
    for note in notes(found):
        print(f"note: {note}")


def notes(found: Comparison) -> Iterator[str]:
    """What a reader of the rows must know."""
    yield (
        "gain, worst: how many times dynapar's makespan, median step and worst step; with closing: "
        "whole steps, all together"
    )
    if (share := traffic_share(found.runs[0])) >= RULED:
        yield (
            f"in {100 * share:.0f} % of dynapar's waves the traffic of sharded parameters is the "
            f"longest part: there no scheduler can gain"
        )
    if any(run.label in PEERS for run in found.runs):
        yield (
            "megatron and verl see LLM tokens alone, as in use; encoder units are placed by "
            "dynapar for all peers"
        )
    yield from found.notes


def _report(question: Question, found: Comparison) -> dict[str, object]:
    request = question.request
    return {
        "source": request.source,
        "cluster": str(request.cluster),
        "sync": request.config.sync,
        "capacity": request.config.capacity,
        "encoder_capacity": request.config.encoder_capacity,
        "global_batch": request.global_batch,
        "seed": request.seed,
        "costs": request.costs.name,
        "measured": request.costs.measured,
        "noise": None
        if question.noise is None
        else {"microbatch": question.noise.microbatch, "rank": question.noise.rank}
        | {"draws": question.noise.draws, "slow": question.noise.slow},
        "bounds": [ticks / 1e6 for ticks in found.bounds],
        "schedulers": [
            row | _details(run) for row, run in zip(rows(found), found.runs, strict=True)
        ],
        "notes": list(notes(found)),
    }


def _details(run: Run) -> dict[str, object]:
    return {
        "makespans": [ticks / 1e6 for ticks in run.makespans],
        "expected": [ticks / 1e6 for ticks in run.expected],
        "traffic waves %": round(100 * traffic_share(run), 3),
    }


def _show_sweep(question: Question, sweep: str, title: str, *, json: bool) -> None:
    name, _, values = sweep.partition("=")
    chosen = [value for value in values.split(",") if value]
    if name not in SWEEPS or not chosen:
        raise ConfigError(
            f"--sweep is {sweep!r}; expected NAME=VALUE,VALUE with a name from "
            f"{', '.join(SWEEPS)}, for example ranks=1x8,8x8"
        )
    table = []
    with progress(f"sweeping {name}") as advance:
        for done, value in enumerate(chosen, start=1):
            found = question.with_value(name, value).answer()
            table.append(_sweep_row(name, value, list(rows(found))))
            advance(done, len(chosen))
    if json:
        show_json({"sweep": name, "rows": table})
        return
    columns = list(dict.fromkeys(column for row in table for column in row))
    full: list[dict[str, Cell]] = [{c: row.get(c, "-") for c in columns} for row in table]
    show_table(title, full)


def _sweep_row(name: str, value: str, found: Sequence[Row]) -> Row:
    ours = found[0]
    row: Row = {name: value}
    row |= {key: ours[key] for key in ("step s", "gap %", "idle %", "tokens/s")}
    for other in found[1:]:
        label = str(other["scheduler"])
        if label == OURS or " " in label:
            continue
        row[f"{label} at"] = other["degree"]
        row[f"{label} gain"] = other["gain"]
        row[f"{label} worst"] = other["worst"]
    return row
