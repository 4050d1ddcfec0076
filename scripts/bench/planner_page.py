"""The page that `scripts/bench/planner --write` makes of its JSON lines."""

import json
import math
from collections import defaultdict
from statistics import fmean, median

from dynapar.simulate.peers.process import LIMIT

OURS, FREE = "dynapar", "dynapar-free"
WIDEST = 64
"""Ranks of a pod under the default peer budget: what is wider is compared with `FREE`."""
KEY = ("costs", "sync", "cluster", "samples", "workload", "scheduler", "seed")
FIGURES = {"step": (1.2, 4.0, 5.0), "microbatch": (2.5, 6.0, 8.0)}
"""Gap in percent: mean over cells, worst cell (mean over its seeds), worst seed."""
HARDER = 1.5
"""Times these under the harder costs."""
TIMES = {("8x8", 512): (3, 10), ("32x8", 2048): (20, 60), ("128x8", 8192): (200, 600)}
"""Planning time in ms: median over the workloads, slowest."""
REFERENCE = "h100_7b"
FLOOR = "&dagger;"

HEAD = """# The planner against its bound and against others

Made by `scripts/bench/planner --out grid.jsonl` (hours on one core; it can be made in parts) and
`scripts/bench/planner --out grid.jsonl --write docs/benchmarks/planner.md`; do not edit. One cell
by itself, for example:

```
scripts/bench/planner --out cell.jsonl --clusters 8x8 --a-rank 8 --workloads video --costs h100_7b
```

Every makespan is a **prediction** under the shipped costs (round figures of a 7B LLM with a 0.3B
encoder on an H100-like device, measured nowhere): `h100_7b` is the reference, `harder` has 80 ms a
microbatch, 30 us a hop, links of 100 and 12 GB/s. Capacity 16,384 tokens and encoder capacity
65,536 a rank; global batches of 2, 8 and 32 samples a rank, at least 64. Only planning time depends
on the machine.

{machine}
"""

PEERS = """## Other schedulers

Makespan over dynapar's on the same batches, under `h100_7b`; above 1 they are slower. All plans are
priced, checked and replayed by the same code; a plan above a capacity, or whose groups do not line
up, is a failure and is in no ratio; one that takes longer than {limit:g} s of CPU time is stopped.
*homogeneous* is the best single degree for the step, *static* the best single degree for all seeds
of a cell, both best-balanced, both by our code; *megatron* (`BalancedCPScheduler`) and *verl*
(`get_seqlen_balanced_partitions`) are the real code of the installed packages and see LLM tokens
alone, as in use (encoder units are placed by us); *dhp* (arXiv 2602.21788) and *entrain*
(2605.27918, from its abstract) are written anew and plan with perfect knowledge of the costs. What
is decided in their favour stands in `dynapar/simulate/peers/`. Megatron refuses fully sharded
parameters and packs nothing, so its row under `microbatch` is hypothetical: each sample would pay
the traffic of all parameters.

A plan with rings of more than 64 ranks makes some rank meet more than 64 others, which the default
`peer_budget` rules out: it is compared with dynapar under `peer_budget=None`.

"under noise" is the ratio of expected makespans (log-normal, sigma 0.05 a microbatch and 0.02 a
rank and step, 512 draws, the same for all; they leave an uncertainty of about 0.2 %), median and
least.
"""


def read(path):
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def page(rows):
    """The page of all rows; of each case the last one counts."""
    rows = list({tuple(row[name] for name in KEY): row for row in rows}.values())
    parts = [HEAD.format(machine=_machine(rows))]
    parts += [_summary(rows), _gaps(rows), _times(rows), _peers(rows), _failures(rows)]
    return "\n".join(part for part in parts if part)


def _of(rows, **fields):
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def _present(rows, name, known=()):
    values = dict.fromkeys(row[name] for row in rows)
    return sorted(values, key=lambda value: (known.index(value) if value in known else 99, value))


def _costs(rows):
    return _present(rows, "costs", (REFERENCE,))


def _syncs(rows):
    return _present(rows, "sync", ("step", "microbatch"))


def _machine(rows):
    cpus = ", ".join(_present(rows, "cpu"))
    versions = [
        f"{name} {', '.join(_present(rows, name))}"
        for name in ("dynapar", "python", "numpy", "numba")
    ]
    peers = sorted({row["peer"] for row in rows if "peer" in row})
    code = ", ".join(sorted({row["code"] for row in rows if row["scheduler"] == OURS}))
    return f"Measured on one core of {cpus}, with {', '.join(versions + peers)}; planner {code}."


def _gap(row):
    return 100 * (row["makespan_us"] / max(1, row["bound_us"]) - 1)


def _cells(rows):
    """For each cell its rows."""
    cells = defaultdict(list)
    for row in rows:
        cells[row["workload"], row["cluster"], row["samples"]].append(row)
    return cells


def _verdict(value, limit):
    return (
        f"{value:.1f} (of {limit:g})"
        if value <= limit + 5e-4
        else f"**{value:.1f}** (of {limit:g})"
    )


def _summary(rows):
    """The figures of the design, and what misses them."""
    lines = ["## Against the figures", "", "Gap to the lower bound in percent; bold: missed.", ""]
    lines += [
        "| costs | sync | cells | mean | worst cell | worst seed |",
        "|---|---|---|---|---|---|",
    ]
    misses = []
    for costs in _costs(rows):
        for sync in _syncs(rows):
            own = _of(rows, scheduler=OURS, costs=costs, sync=sync)
            if not own:
                continue
            limits = [x * (1 if costs == REFERENCE else HARDER) for x in FIGURES[sync]]
            means = {cell: fmean(map(_gap, found)) for cell, found in _cells(own).items()}
            worst = max(map(_gap, own))
            found = (fmean(means.values()), max(means.values()), worst)
            texts = [_verdict(value, limit) for value, limit in zip(found, limits, strict=True)]
            lines.append(f"| {costs} | {sync} | {len(means)} | {' | '.join(texts)} |")
            for cell, gap in sorted(means.items(), key=lambda item: -item[1]):
                seeds = [row for row in _cells(own)[cell] if _gap(row) > limits[2]]
                if gap > limits[1] or seeds:
                    misses.append(
                        f"- {costs}, {sync}: {_name(cell)}: mean {gap:.1f} %, worst seed "
                        f"{max(map(_gap, _cells(own)[cell])):.1f} %"
                    )
    lines += ["", "Cells that miss a figure:" if misses else "No cell misses its figure.", ""]
    lines += misses
    return "\n".join([*lines, "", *_never_above(rows), ""])


def _name(cell):
    workload, cluster, samples = cell
    return f"{workload} on {cluster}, {samples:,} samples"


def _pairs(rows, scheduler, field="makespan_us"):
    """(theirs / ours, row) of the cases that both have."""
    names = KEY[:5] + KEY[6:]
    own = {tuple(row[n] for n in names): row for row in _of(rows, scheduler=OURS)}
    free = {tuple(row[n] for n in names): row for row in _of(rows, scheduler=FREE)}
    for row in _of(rows, scheduler=scheduler):
        wide = row.get("degrees", [1])[-1] > WIDEST
        mine = (free if wide else own).get(tuple(row[n] for n in names))
        if mine is not None and field in row:
            yield row[field] / max(1, mine[field]), row


def _others(rows):
    known = ("homogeneous", "static", "megatron", "verl", "dhp", "entrain")
    return [name for name in _present(rows, "scheduler", known) if name not in (OURS, FREE)]


def _never_above(rows):
    """Where another scheduler is ahead, in sentences."""
    for field, what in (("makespan_us", "makespan"), ("expected_us", "makespan under noise")):
        total, behind, cases = 0, [], set()
        for name in _others(rows):
            for ratio, row in _pairs(rows, name, field):
                total += 1
                if ratio < 1 - 1e-9:
                    behind.append((ratio, name, row))
                    cases.add(tuple(row[n] for n in (*KEY[:5], "seed")))
        if not behind:
            yield f"dynapar's {what} is above no other's in any of {total:,} comparisons."
            yield ""
            continue
        by = defaultdict(int)
        for _, name, _ in behind:
            by[name] += 1
        counts = ", ".join(f"{name} {count}" for name, count in by.items())
        yield (
            f"dynapar's {what} is **above another's** in {len(behind)} of {total:,} comparisons "
            f"({counts}), in {len(cases)} batches; the largest:"
        )
        yield ""
        for ratio, name, row in sorted(behind, key=lambda item: item[0])[:8]:
            cell = _name((row["workload"], row["cluster"], row["samples"]))
            yield f"- {row['costs']}, {row['sync']}: {cell}, seed {row['seed']}: {name} {ratio:.4f}"
        yield ""


def _gaps(rows):
    lines = [
        "## Gap to the lower bound",
        "",
        "Percent, mean over the seeds / worst seed; columns are clusters and samples a step. "
        f"{FLOOR}: every wave is as long as its parameters' traffic, whatever is planned.",
    ]
    for costs in _costs(rows):
        for sync in _syncs(rows):
            own = _of(rows, scheduler=OURS, costs=costs, sync=sync)
            if own:
                lines += ["", f"### {costs}, {sync}", "", *_gap_table(own)]
    return "\n".join([*lines, ""])


def _gap_table(own):
    columns = sorted(
        {(row["cluster"], row["samples"]) for row in own},
        key=lambda c: (math.prod(map(int, c[0].split("x"))), c[1]),
    )
    cells = _cells(own)
    yield "| workload | " + " | ".join(f"{c}, {samples:,}" for c, samples in columns) + " |"
    yield "|---" * (1 + len(columns)) + "|"
    for workload in dict.fromkeys(row["workload"] for row in own):
        texts = []
        for cluster, samples in columns:
            found = cells.get((workload, cluster, samples))
            if not found:
                texts.append("-")
                continue
            gaps = [_gap(row) for row in found]
            mark = FLOOR if all(row["floor"] for row in found) else ""
            texts.append(f"{fmean(gaps):.1f} / {max(gaps):.1f}{mark}")
        yield f"| {workload} | " + " | ".join(texts) + " |"


def _times(rows):
    lines = [
        "## Planning time",
        "",
        "Milliseconds on one core, warm, metadata columns in, StepPlan out, under `h100_7b`; of "
        "each workload the median over its seeds. CPU time of the planning thread; by the clock of "
        "a loaded machine in brackets. Bold: above the figure.",
        "",
        "| ranks x samples | sync | median of the workloads | slowest | slowest workload |",
        "|---|---|---|---|---|",
    ]
    for (cluster, samples), (middle, most) in TIMES.items():
        for sync in _syncs(rows):
            found = _of(rows, scheduler=OURS, costs=REFERENCE, sync=sync)
            found = _of(found, cluster=cluster, samples=samples)
            if not found:
                continue
            by = defaultdict(list)
            for row in found:
                by[row["workload"]].append(row)
            cpu = {name: median(row["cpu_ms"] for row in own) for name, own in by.items()}
            clock = [median(row["clock_ms"] for row in own) for own in by.values()]
            slowest = max(found, key=lambda row: row["cpu_ms"])
            lines.append(
                f"| {math.prod(map(int, cluster.split('x'))):,} x {samples:,} | {sync} | "
                f"{_verdict(median(cpu.values()), middle)} [{median(clock):.1f}] | "
                f"{_verdict(slowest['cpu_ms'], most)} [{slowest['clock_ms']:.1f}] | "
                f"{slowest['workload']}, seed {slowest['seed']} |"
            )
    return "\n".join([*lines, ""])


def _peers(rows):
    rows = _of(rows, costs=REFERENCE)
    lines = [PEERS.format(limit=LIMIT)]
    for sync in _syncs(rows):
        found = _of(rows, sync=sync)
        clusters = sorted(
            _present(found, "cluster"), key=lambda c: math.prod(map(int, c.split("x")))
        )
        lines += [
            f"### {sync}",
            "",
            "| scheduler | cases | failures | timeouts | median | worst | least | under noise | "
            + " | ".join(clusters)
            + " | plan ms, median | slowest |",
            "|---" * (10 + len(clusters)) + "|",
        ]
        lines += [_peer_row(found, name, clusters) for name in _others(found)]
        lines.append("")
    return "\n".join(lines)


def _peer_row(found, name, clusters):
    """Figures of one scheduler; by cluster the median."""
    own = _of(found, scheduler=name)
    failed = [row for row in own if "failure" in row]
    timeouts = sum(row["timeout"] for row in failed)
    pairs = list(_pairs(found, name))
    ratios = [ratio for ratio, _ in pairs]
    noisy = [ratio for ratio, _ in _pairs(found, name, "expected_us")]
    texts = [str(len(own)), str(len(failed) - timeouts), str(timeouts)]
    texts += _numbers(ratios, median, max, min)
    texts.append(" / ".join(_numbers(noisy, median, min)))
    for cluster in clusters:
        texts += _numbers([ratio for ratio, row in pairs if row["cluster"] == cluster], median)
    times = [row["cpu_ms"] for row in own if "cpu_ms" in row]
    texts += [f"{median(times):.1f}", f"{max(times):,.0f}"] if times else ["-", "-"]
    return f"| {name} | " + " | ".join(texts) + " |"


def _numbers(values, *functions):
    return [f"{function(values):.3f}" if values else "-" for function in functions]


def _failures(rows):
    failed = [row for row in _of(rows, costs=REFERENCE) if "failure" in row]
    if not failed:
        return ""
    lines = ["## Failures", "", "An example of each, under `h100_7b`.", ""]
    kinds = defaultdict(list)
    for row in failed:
        kinds[row["scheduler"], row["sync"], " ".join(row["failure"].split()[:2])].append(row)
    for (name, sync, _), found in kinds.items():
        row = found[0]
        cell = _name((row["workload"], row["cluster"], row["samples"]))
        lines.append(
            f"- {name}, {sync}, {len(found)} cases; {cell}, seed {row['seed']}: {row['failure']}"
        )
    return "\n".join([*lines, ""])
