"""Price a ring's attention on real ranks: CPU time, work and bytes, against one device and others.

The ranks are gloo processes of one thread on this machine. A turn runs everything once, forward and
backward, one after the other: the ring (all its ranks at once, between barriers), other rings, and
on rank 0 alone the same batch as one device computes it. Figures are medians over turns of ratios
within a turn, so that what slows the machine for a while slows both sides. CPU time is that of the
thread that computes; gloo copies messages in threads of its own, which one figure counts too.

Ranks that outnumber the cores, or cores that share caches and units, take more CPU time for the
same work than one busy rank does. So a ring is also compared with degree 1 at its own conditions:
all ranks at once, each with the whole batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dynapar.attention import bands as masks
from dynapar.attention.api import attend
from dynapar.attention.bands import Bands
from dynapar.attention.evenly import cut_evenly
from dynapar.attention.exchange import Transport
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.bench.attention_peers import OneSequence, PeerRefusedError, prepare
from dynapar.bench.one_device import Packed, cpu_op, sdpa
from dynapar.errors import ConfigError
from dynapar.verify.spawn import run_on_ranks

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}

MASKS: dict[str, Callable[[int, int], Bands]] = {
    "causal": lambda length, _: masks.causal(length),
    "full": lambda length, _: masks.full(length),
    "window": lambda length, width: masks.window(length, width=width),
    "chunked": lambda length, width: masks.chunked(length, width=width),
    "prefix": lambda length, width: masks.prefix(length, tokens=min(width, length)),
}
"""Of a length and a number that some of them need."""

OURS, BARE, DEVICE = "dynapar", "cpu op", "one device"
_ALONE, _CROWDED = "dynapar alone", "dynapar alone on each rank"
Run = Callable[[], object]
"""Forward and backward, of this rank's part or of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """What a ring computes."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    degree: int
    """Ranks."""
    mask: str = "causal"
    """A name of `MASKS`, with ":" and a number where it needs one, such as "window:512"."""
    dtype: str = "float32"
    """A name of `DTYPES`."""
    heads: tuple[int, int, int] = (8, 2, 64)
    """Query heads, key/value heads, width."""
    scheme: str = "auto"
    """Of `attention.select`."""
    turns: int = 9
    peers: tuple[str, ...] = ()
    """Names of `attention_peers.PEERS` to run on one causal sequence."""

    def bands(self) -> list[Bands]:
        """The mask of each sequence.

        Raises:
            ConfigError: There is no such mask, or it has no number, or one too many.
        """
        name, _, number = self.mask.partition(":")
        needs = name not in ("causal", "full")
        if name not in MASKS or bool(number) != needs or (needs and not number.isdecimal()):
            raise ConfigError(
                f"the mask is {self.mask!r}; expected causal, full, window:N, chunked:N or prefix:N"
            )
        return [MASKS[name](length, int(number or 0)) for length in self.lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionResult:
    """What one contender did at one degree."""

    what: str
    degree: int
    seconds: float
    """Median CPU seconds of the rank where that is most, forward and backward."""
    throughput: float
    """Visible pairs for each second of each rank, over those of `scaled_dot_product_attention`
    called once for each sequence on one device."""
    of_op: float | None = None
    """The same over torch's CPU op called so; None where the op has no such mask."""
    of_degree_1: float | None = None
    """CPU time of the slowest rank over that of degree 1 divided by the degree, on rank 0 while the
    others wait."""
    of_crowded_degree_1: float | None = None
    """The same over degree 1 on all ranks at once, each with the whole batch; the worst rank's."""
    with_transport: float | None = None
    """The same with the threads that carry the messages."""
    work: float | None = None
    """Largest share of the visible pairs, times the degree; 1 is even."""
    sent: float | None = None
    """Bytes that forward sends over those of the rows that are needed elsewhere."""
    ring_sends: float | None = None
    """The same of a ring that forwards all rows."""
    refused: str | None = None
    """Why it did not run, if it did not."""


@dataclass(slots=True)
class _Sent:
    """Counts the bytes of messages."""

    forward: int = 0

    def record(
        self,
        *,
        communicator: str,
        operation: str,
        sends: Sequence[tuple[int, int]],
        receives: Sequence[tuple[int, int]],
    ) -> None:
        """A batch of messages is issued."""
        if "backward" not in operation:
            self.forward += sum(size for _, size in sends)

    def record_collective(
        self, *, communicator: str, operation: str, members: Sequence[int], size: int
    ) -> None:
        """A collective is issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readings:
    """Of one rank."""

    seconds: dict[str, list[float]]
    """CPU time of the thread that computes, by turn."""
    process: dict[str, list[float]]
    """CPU time of all threads."""
    sent: int
    refused: dict[str, str] = field(default_factory=dict)


def measure(case: AttentionCase) -> list[AttentionResult]:
    """Run a case on as many processes as its degree: dynapar first, then the peers.

    Raises:
        ConfigError: The case cannot be run.
    """
    if case.dtype not in DTYPES:
        raise ConfigError(f"the dtype is {case.dtype!r}; expected one of {sorted(DTYPES)}")
    plan = _plan(case)
    readings = run_on_ranks(_on_rank, case, ranks=case.degree)
    seconds = readings[0].seconds
    device = seconds[DEVICE]

    def slowest(what: str) -> list[float]:
        return max((r.seconds[what] for r in readings), key=statistics.median)

    def result(what: str) -> AttentionResult:
        return AttentionResult(
            what=what,
            degree=case.degree,
            seconds=statistics.median(slowest(what)),
            throughput=_ratio(device, slowest(what)) / case.degree,
        )

    needed = _needed_bytes(case)
    all_rows = (case.degree - 1) * sum(case.lengths) * _row_bytes(case)
    process = max((r.process[OURS] for r in readings), key=statistics.median)
    ours = replace(
        result(OURS),
        of_op=_ratio(seconds[BARE], slowest(OURS)) / case.degree if BARE in seconds else None,
        of_degree_1=_ratio(slowest(OURS), seconds[_ALONE]) * case.degree,
        of_crowded_degree_1=max(
            _ratio(r.seconds[OURS], r.seconds[_CROWDED]) * case.degree for r in readings
        ),
        with_transport=_ratio(process, readings[0].process[_ALONE]) * case.degree,
        work=max(plan.work) * case.degree / sum(plan.work),
        sent=sum(r.sent for r in readings) / needed if needed else 1.0,
        ring_sends=all_rows / needed if needed else 1.0,
    )
    results = [ours]
    for peer in case.peers if case.degree > 1 else ():
        if peer in readings[0].refused:
            results.append(_refusal(peer, case.degree, readings[0].refused[peer]))
        else:
            results.append(result(peer))
    return results


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _refusal(peer: str, degree: int, reason: str) -> AttentionResult:
    return AttentionResult(what=peer, degree=degree, seconds=0.0, throughput=0.0, refused=reason)


def _needed_bytes(case: AttentionCase) -> int:
    """Of the keys and values that some rank needs and another holds."""
    plan = _plan(replace(case, scheme="staged"))
    return sum(plan.fetched(p) for p in range(case.degree)) * _row_bytes(case)


def _row_bytes(case: AttentionCase) -> int:
    """Of one token's keys and values."""
    _, kv_heads, width = case.heads
    return 2 * kv_heads * width * DTYPES[case.dtype].itemsize


def _plan(case: AttentionCase) -> AttentionPlan:
    bands = case.bands()
    return plan_attention(
        case.lengths,
        degree=case.degree,
        bands=bands,
        spans=cut_evenly(case.lengths, degree=case.degree, masks=[bands]),
        scheme=case.scheme,
    )


def _on_rank(rank: int, case: AttentionCase) -> _Readings:
    torch.manual_seed(0)
    sent = _Sent()
    transport = Transport(recorder=sent)
    transport.warm_up()
    query_heads, kv_heads, width = case.heads
    tokens, dtype = sum(case.lengths), DTYPES[case.dtype]
    q, k, v, grad = (
        torch.randn(tokens, heads, width).to(dtype)
        for heads in (query_heads, kv_heads, kv_heads, query_heads)
    )
    given = Packed(q, k, v, grad, case.lengths, case.bands())
    together = {OURS: _ours(case, transport, given, range(case.degree))}
    together[OURS]()
    forward = sent.forward
    one = replace(case, degree=1, scheme="auto")
    together[_CROWDED] = _ours(one, transport, given, [rank])
    peers, refused = _peers(case, rank, given)
    together |= peers
    alone: dict[str, Run] = {}
    if rank == 0:
        alone = {
            _ALONE: _ours(one, transport, given, [rank]),
            DEVICE: sdpa(given),
        }
        if op := cpu_op(given):
            alone[BARE] = op
    seconds, process = _turns(together, alone, case.turns)
    return _Readings(seconds=seconds, process=process, sent=forward, refused=refused)


def _ours(case: AttentionCase, transport: Transport, given: Packed, ranks: Sequence[int]) -> Run:
    """Forward and backward of this rank's shard, or of all where the degree is 1."""
    plan = _plan(case)
    bound = plan.bind(ranks=ranks, transport=transport)
    rows = torch.from_numpy(plan.index(bound.position))
    q, k, v = (x[rows].requires_grad_() for x in (given.q, given.k, given.v))
    grad = given.grad[rows]

    def run() -> None:
        out = attend(q, k, v, bound)
        torch.autograd.grad(out, (q, k, v), grad)

    return run


def _peers(case: AttentionCase, rank: int, given: Packed) -> tuple[dict[str, Run], dict[str, str]]:
    """Those that can run, and why others cannot."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    if case.degree == 1:
        return runs, refused
    for peer in case.peers:
        if case.mask != "causal" or len(case.lengths) > 1:
            refused[peer] = "it is compared on one causal sequence"
            continue
        try:
            run = prepare(peer, OneSequence.of(given), rank, case.degree)
        except PeerRefusedError as error:
            refused[peer] = str(error)
        else:
            runs[peer] = run
    return runs, refused


def _turns(
    together: dict[str, Run], alone: dict[str, Run], turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds by turn, of the thread and of the process; all ranks start at a barrier."""
    names = (*together, *alone)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    process: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name, run in (*together.items(), *alone.items()):
            if name in together:
                dist.barrier()
            began = time.thread_time(), time.process_time()
            run()
            if turn:  # The first one warms up.
                seconds[name].append(time.thread_time() - began[0])
                process[name].append(time.process_time() - began[1])
        dist.barrier()
    return seconds, process
