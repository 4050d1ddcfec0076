"""What a plan's JSON form must look like before it is read, and where two forms differ."""

from __future__ import annotations

from collections.abc import Mapping

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Schema = Mapping[str, "Schema"] | list["Schema"] | frozenset[str] | str
"""Keys and their schemas, a list of one schema, words to choose from, or the name of a kind."""

_MICROBATCH: Schema = {
    "id": "integer",
    "ranks": ["integer"],
    "samples": [{"id": "string", "ranks": ["integer"], "encoders": ["integer"]}],
    "tokens_per_rank": ["integer"],
    "encoder_tokens_per_rank": ["integer"],
    "encoder_calls": "object",
    "seconds": "number",
    "start": "number",
    "parts": dict.fromkeys(("linear", "attention", "exchange", "encoder", "fixed"), "number"),
}
_SAMPLE: Schema = {
    "id": "string",
    "llm_tokens": "integer",
    "text_tokens": "integer",
    "label_tokens": "integer",
    "modalities": [frozenset({"image", "video", "audio"})],
    "encoder_tokens": "integer",
    "encoder_units": ["integer"],
}
_STEP: dict[str, Schema] = {
    "step": "integer",
    "sync": frozenset({"step", "microbatch"}),
    "ranks": "integer",
    "ranks_per_node": "integer",
    "capacity": "integer",
    "encoder_capacity": "integer",
    "rings": {
        "degrees": frozenset({"any", "pow2"}),
        "windows": frozenset({"any", "aligned"}),
        "peer_budget": "integer or null",
        "max_degree": "integer or null",
    },
    "equal_counts": "boolean",
    "costs": "string",
    "samples": [_SAMPLE],
    "microbatches": [_MICROBATCH],
    "queues": [["integer or null"]],
    "makespan": "number",
    "lower_bound": "number",
    "gap": "number",
    "optimal": "boolean",
    "homogeneous": {"degree": "integer", "makespan": "number"},
    "chosen": frozenset({"dynamic", "homogeneous"}),
    "digest": "string",
    "plan_seconds": "number",
}
_WAVES: Schema = [dict.fromkeys(("start", "seconds", "encoder", "llm"), "number")]
MOST = 1 << 53
"""Beyond it numbers are not exact in every reader of JSON; NaN is never within."""


def form_fault(values: Mapping[str, Json], more: Mapping[str, Schema] | None = None) -> str:
    """The first key of a plan that is missing or holds another kind of value; empty if none is.

    Args:
        values: One parsed line of a plans file.
        more: Keys that its version has besides.

    Returns:
        Such as "queues[2] is 7; expected a list".
    """
    extra = {"waves": _WAVES} if values.get("sync") == "microbatch" else {}
    return fault_of(values, _STEP | extra, "") or fault_of(values, more or {}, "")


def first_difference(written: object, own: object, path: str = "") -> str:
    """Where what is on file first differs from a plan's own form; empty where it does not.

    Args:
        written: What the file says.
        own: What it should say.
        path: Of both, such as "microbatches[3]".

    Returns:
        Such as "gap is 0.5; expected 0.25".
    """
    if isinstance(written, Mapping) and isinstance(own, Mapping):
        for key in [*own, *(key for key in written if key not in own)]:
            where = f"{path}.{key}" if path else str(key)
            if key not in written:
                return f"{where} is missing; expected {_shown(own[key])}"
            if key not in own:
                return f"{where} is an unknown key; expected none"
            if found := first_difference(written[key], own[key], where):
                return found
        return ""
    if isinstance(written, list) and isinstance(own, list):
        if len(written) != len(own):
            return f"{path} has {len(written)} entries; expected {len(own)}"
        pairs = enumerate(zip(written, own, strict=True))
        faults = (first_difference(a, b, f"{path}[{index}]") for index, (a, b) in pairs)
        return next(filter(None, faults), "")
    same = written == own and isinstance(written, bool) == isinstance(own, bool)
    return "" if same else f"{path} is {_shown(written)}; expected {_shown(own)}"


def fault_of(value: object, schema: Schema, path: str) -> str:
    """The first place of a value that is not as a schema says; empty where there is none."""
    if isinstance(schema, Mapping):
        if not isinstance(value, Mapping):
            return f"{path} is {_shown(value)}; expected an object"
        for key, inner in schema.items():
            where = f"{path}.{key}" if path else key
            if key not in value:
                return f"{where} is missing"
            if found := fault_of(value[key], inner, where):
                return found
        return ""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return f"{path} is {_shown(value)}; expected a list"
        faults = (fault_of(entry, schema[0], f"{path}[{i}]") for i, entry in enumerate(value))
        return next(filter(None, faults), "")
    if isinstance(schema, frozenset):
        if isinstance(value, str) and value in schema:
            return ""
        return f"{path} is {_shown(value)}; expected one of {', '.join(sorted(schema))}"
    if _is_kind(value, schema):
        return ""
    return f"{path} is {_shown(value)}; expected {'an' if schema[0] in 'aeiou' else 'a'} {schema}"


def _is_kind(value: object, kind: str) -> bool:
    if kind == "object":
        return isinstance(value, Mapping)
    if kind == "string":
        return isinstance(value, str)
    if kind == "boolean":
        return isinstance(value, bool)
    if value is None:
        return kind == "integer or null"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    whole = isinstance(value, int) or kind == "number"
    return whole and abs(value) <= MOST


def _shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, Mapping | list):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
