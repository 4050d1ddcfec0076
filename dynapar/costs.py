"""What work costs on some hardware: cost files, and the coefficients that the planner counts with.

A cost file has the sections below, in seconds, bytes and tokens. `linear` and `fixed` are
required; any other section may be left out and then costs nothing, so that a small measured set
(linear, attention, fixed) has the same form as the shipped reference.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TypeVar

from dynapar.errors import CostsError
from dynapar.packing.ticks import Coefficients

VERSION = 1
REFERENCE = "h100_7b"
"""Name of the costs that are taken where none are given: round figures, measured nowhere."""
SHIPPED = (REFERENCE, "harder")
"""Names of all shipped costs. "harder" has a dearer microbatch, longer hops and slower links."""
TICKS_PER_SECOND = 1_000_000
MOST_TICKS = 1 << 40
"""No coefficient reaches this: 12 days."""

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """6 * parameters * n / (flops * n / (n + half_rate_tokens)) for n tokens on a rank."""

    parameters: float
    """Parameters that a token passes."""
    flops: float
    """FLOPs per second, far from small n."""
    half_rate_tokens: float = 0.0
    """Tokens on a rank at which half of `flops` is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCosts:
    """3.5 * 2 * layers * hidden * s^2 / d / (flops * m / (m + half_rate_tokens)), m = s / d."""

    layers: int = 0
    hidden: int = 0
    """Query heads times head dimension."""
    flops: float = 1.0
    """FLOPs per second, far from small m."""
    half_rate_tokens: float = 0.0
    """Tokens on a rank at which half of `flops` is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """Keys and values on their way: what attention does not hide, and the latency of hops."""

    layers: int = 1
    kv_bytes_per_token: float = 0.0
    """Of one layer's keys and values."""
    needed_share: float = 1.0
    """Part of the rows that the mask needs."""
    passes: float = 3.0
    """Forward once, backward twice the bytes."""
    bytes_per_s_in_node: float = 1.0
    bytes_per_s_across: float = 1.0
    """Between nodes; at most `bytes_per_s_in_node`."""
    latency: float = 0.0
    """Seconds of a hop, per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCosts:
    """(6 * parameters * p + 3.5 * 4 * layers * hidden * p^2) / flops for a unit of p tokens."""

    parameters: float = 0.0
    layers: int = 0
    hidden: int = 0
    flops: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCosts:
    """8 * parameters / flops for a target: the output layer and its loss, of targets alone.

    Forward 2, the same again in backward, and 4: logits are not kept.
    """

    parameters: float = 0.0
    flops: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What "offload" moves between device and host."""

    bytes_per_s: float
    """One way, as measured there and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCosts:
    """What every microbatch costs."""

    microbatch: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedCosts:
    """Parameters gathered and scattered in each wave (`sync="microbatch"` only)."""

    bytes_per_s: float = 1.0
    llm_bytes: float = 0.0
    encoder_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of the closing pass and the optimizer: constants outside of the makespan."""

    closing_step: float = 0.0
    closing_microbatch: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What costs were measured on; they say nothing of anything else."""

    hardware: str
    """Name and count of devices, or the processor."""
    model: str
    """Digest of the model's sizes."""
    precision: str
    versions: str
    """Of what computes; another version may be faster or slower, and is not refused."""
    attention: str = "staged"
    """How rings shared attention; a run that does otherwise is told so, and not refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A cost file. `name` and `measured` say where it comes from."""

    name: str
    measured: bool
    """Whether the figures were measured on the hardware that they are used for."""
    linear: LinearCosts
    fixed: FixedCosts
    attention: AttentionCosts = AttentionCosts()
    exchange: ExchangeCosts = ExchangeCosts()
    encoder: EncoderCosts = EncoderCosts()
    sharded: ShardedCosts = ShardedCosts()
    step: StepCosts = StepCosts()
    output: OutputCosts = OutputCosts()
    host: HostCosts | None = None
    """None: not measured; "offload" is then priced by an assumed rate."""
    audio: EncoderCosts | None = None
    """Of audio clips; None: as `encoder`. `dynapar inspect` prices clips by it. Plans know a unit's
    tokens and not its kind, and price every unit by `encoder`."""
    measured_on: MeasuredOn | None = None
    """Of a file that `dynapar calibrate` wrote."""
    contention_prior: float = 1.0
    """Factor by which overlapped communication slows compute; not part of any prediction yet."""

    def __post_init__(self) -> None:
        for section in _SECTIONS:
            given = getattr(self, section)
            for key, value in (asdict(given) if given is not None else {}).items():
                rate = key == "flops" or key.startswith("bytes_per_s") or key == "layers"
                least = 1e-300 if rate and not (section != "exchange" and key == "layers") else 0
                if not least <= value < float("inf"):
                    expected = "above 0" if least else "0 or more"
                    raise CostsError(
                        f"costs {self.name!r}: {section}.{key} is {value}; expected a finite "
                        f"number {expected}"
                    )
        if self.output.parameters and not (self.attention.layers and self.attention.hidden):
            raise CostsError(
                f"costs {self.name!r}: output.parameters is {self.output.parameters:g} without "
                "attention; expected attention.layers and attention.hidden above 0, by which the "
                "planner counts targets. Add them, or leave the section output out"
            )
        if self.exchange.bytes_per_s_across > self.exchange.bytes_per_s_in_node:
            raise CostsError(
                f"costs {self.name!r}: exchange.bytes_per_s_across is "
                f"{self.exchange.bytes_per_s_across:g}, above bytes_per_s_in_node "
                f"{self.exchange.bytes_per_s_in_node:g}; expected at most that: swap them, or "
                f"give both the same value"
            )


_SECTIONS: dict[str, type] = {
    "linear": LinearCosts,
    "attention": AttentionCosts,
    "exchange": ExchangeCosts,
    "encoder": EncoderCosts,
    "audio": EncoderCosts,
    "fixed": FixedCosts,
    "sharded": ShardedCosts,
    "step": StepCosts,
    "output": OutputCosts,
    "host": HostCosts,
}


def _section(kind: type[Section], values: Json, where: str) -> Section:
    if not isinstance(values, dict):
        raise CostsError(f"{where} is {values!r}; expected an object of numbers")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if extra := sorted(set(values) - set(known)):
        raise CostsError(f"{where} has {extra[0]!r}; expected one of {', '.join(known)}")
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CostsError(f"{where}.{key} is {value!r}; expected a number")
    try:
        return kind(**values)
    except TypeError as error:
        raise CostsError(f"{where} is incomplete ({error}); add what is missing") from None


def costs_from_json(values: Json, *, where: str = "costs") -> Costs:
    """Read a parsed cost file.

    Args:
        values: The parsed JSON.
        where: What to call it in messages.

    Raises:
        CostsError: It is of another version, lacks a section or key, or holds a bad value.
    """
    if not isinstance(values, dict):
        raise CostsError(f"{where} is not an object; expected a cost file")
    if values.get("version") != VERSION:
        raise CostsError(
            f"{where} has version {values.get('version')!r}; expected {VERSION}: calibrate again"
        )
    known = {"version", "name", "measured", "measured_on", "unit", "contention_prior", *_SECTIONS}
    if extra := sorted(set(values) - known):
        raise CostsError(f"{where} has {extra[0]!r}; expected one of {', '.join(sorted(known))}")
    for section in ("linear", "fixed"):
        if section not in values:
            raise CostsError(f"{where} has no section {section!r}; add it")
    name, measured = values.get("name"), values.get("measured")
    prior = values.get("contention_prior", 1.0)
    if not isinstance(name, str) or not isinstance(measured, bool):
        raise CostsError(f"{where} needs a text `name` and a true or false `measured`")
    if isinstance(prior, bool) or not isinstance(prior, (int, float)):
        raise CostsError(f"{where}.contention_prior is {prior!r}; expected a number")
    sections: dict[str, object] = {
        key: _section(kind, values[key], f"{where}.{key}")
        for key, kind in _SECTIONS.items()
        if key in values
    }
    return Costs(
        name=name,
        measured=measured,
        measured_on=_measured_on(values.get("measured_on"), f"{where}.measured_on"),
        contention_prior=float(prior),
        **sections,  # type: ignore[arg-type]
    )


def _measured_on(values: Json, where: str) -> MeasuredOn | None:
    if values is None:
        return None
    names = [field.name for field in fields(MeasuredOn)]
    # Files of before say nothing of attention.
    given = {"attention": "staged", **values} if isinstance(values, dict) else {}
    texts = all(isinstance(text, str) for text in given.values())
    if sorted(given) != sorted(names) or not texts:
        raise CostsError(
            f"{where} is {values!r}; expected texts {', '.join(names)}: calibrate again"
        )
    return MeasuredOn(**{name: str(given[name]) for name in names})


def check_origin(costs: Costs, here: MeasuredOn) -> None:
    """Refuse costs that were measured on other hardware, of another model or in another precision.

    Costs that say nothing of where they come from, such as the shipped ones, pass.

    Raises:
        CostsError: One of the three differs; both values are named.
    """
    if costs.measured_on is None:
        return
    for name in ("hardware", "model", "precision"):
        theirs, ours = getattr(costs.measured_on, name), getattr(here, name)
        if theirs != ours:
            raise CostsError(
                f"costs {costs.name!r} were measured with {name} {theirs!r}; expected {ours!r}, as "
                "here. Run `dynapar calibrate` on this machine, or set force_costs: true to plan "
                "by them all the same"
            )


def costs_to_json(costs: Costs) -> dict[str, Json]:
    """The content of a cost file; `costs_from_json` reads it back."""
    values = {key: value for key, value in asdict(costs).items() if value is not None}
    return {"version": VERSION, "unit": "seconds, bytes, tokens", **values}


def load_costs(path: str | Path | None) -> Costs:
    """Read a cost file.

    Args:
        path: The file, or the name of shipped costs; None for the reference. What is shipped is
            not measured.

    Raises:
        CostsError: The file is missing, is not JSON, or is not a cost file.
    """
    if path is None:
        return _shipped(REFERENCE)
    if str(path) in SHIPPED and not Path(path).exists():
        return _shipped(str(path))
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CostsError(
            f"costs {str(path)!r}: {error.strerror}; give a cost file, or "
            f"the name of shipped costs: {', '.join(SHIPPED)}"
        ) from None
    except ValueError as error:
        raise CostsError(
            f"costs {str(path)!r} is not JSON ({error}); expected a whole cost file. Copy it "
            "again, or run `dynapar calibrate`"
        ) from None
    return costs_from_json(values, where=f"costs {str(path)!r}")


@cache
def _shipped(name: str) -> Costs:
    path = Path(__file__).parent / "reference_costs" / f"{name}.json"
    return costs_from_json(json.loads(path.read_text(encoding="utf-8")))


def coefficients(costs: Costs, *, ranks_per_node: int) -> Coefficients:
    """The planner's coefficients, in ticks.

    Args:
        costs: The cost file.
        ranks_per_node: Degrees above this pay the bandwidth between nodes.

    Raises:
        CostsError: One of them is too large to be counted with.
    """
    second = float(TICKS_PER_SECOND)
    linear, attention, exchange = costs.linear, costs.attention, costs.exchange
    encoder, sharded = costs.encoder, costs.sharded
    token = 6.0 * linear.parameters / linear.flops * second
    wire = exchange.passes * exchange.needed_share * exchange.kv_bytes_per_token * second
    found = Coefficients(
        linear_token=token,
        linear_rank=_ticks(token * linear.half_rate_tokens),
        attention_pair=7.0 * attention.layers * attention.hidden / attention.flops * second,
        attention_half=float(attention.half_rate_tokens),
        exchange_layers=int(exchange.layers),
        wire_in_node=wire / exchange.bytes_per_s_in_node,
        wire_across=wire / exchange.bytes_per_s_across,
        hop=exchange.layers * exchange.latency * second,
        encoder_token=6.0 * encoder.parameters / encoder.flops * second,
        encoder_square=14.0 * encoder.layers * encoder.hidden / encoder.flops * second,
        fixed=_ticks(costs.fixed.microbatch * second),
        llm_floor=_ticks(sharded.llm_bytes / sharded.bytes_per_s * second),
        encoder_floor=_ticks(sharded.encoder_bytes / sharded.bytes_per_s * second),
        node=ranks_per_node,
    )
    for name, value in found._asdict().items():
        if not value < MOST_TICKS:
            raise CostsError(
                f"costs {costs.name!r} give {name} {value:.3g} microseconds; expected less than "
                f"{MOST_TICKS:.3g}. Check the rates: FLOPs and bytes are a second's"
            )
    return found


def target_reach(costs: Costs) -> float:
    """What a target costs, in squared tokens of causal attention; 0 where it costs nothing.

    The planner's kernels count a sample by its tokens and its reach (`dynapar.packing.ticks`). A
    target's cost is shared by a sample's ranks as its pairs are, so it enters as reach.
    """
    output, attention = costs.output, costs.attention
    if not output.parameters:
        return 0.0
    pair = 7.0 * attention.layers * attention.hidden / attention.flops
    return 8.0 * output.parameters / output.flops / pair


def _ticks(value: float) -> int:
    """Half up, like every rounding to ticks; at most `MOST_TICKS`, which is refused."""
    return int(value + 0.5) if value < MOST_TICKS else MOST_TICKS
