"""Stand-ins for torch's CUDA flash ops: schemas recorded from its releases, the math of flash-attn.

`native_functions.yaml` of the wheels of torch 2.10.0, 2.11.0, 2.12.0 and 2.13.0, read on
2026-12-01: 2.12 added `block_table` and `num_splits`, nothing else changed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.attention import fake_flash

_FORWARD = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, "
    "Tensor? cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
    "bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None{more}) -> "
    "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)
_BACKWARD = (
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
    "float dropout_p, bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"
)
_MORE = ", Tensor? block_table=None, int? num_splits=None"
SCHEMAS = {
    "2.10": (_FORWARD.format(more=""), _BACKWARD),
    "2.11": (_FORWARD.format(more=""), _BACKWARD),
    "2.12": (_FORWARD.format(more=_MORE), _BACKWARD),
    "2.13": (_FORWARD.format(more=_MORE), _BACKWARD),
}
_TYPES: dict[str, set[type]] = {
    "Tensor": {Tensor},
    "int": {int},
    "SymInt": {int},
    "float": {float},
    "bool": {bool},
}


def bind(schema: str, args: Sequence[object], keywords: dict[str, object]) -> dict[str, Any]:
    """Arguments by name, as the dispatcher would bind them; fails where it would."""
    wanted = torch._C.parse_schema(schema).arguments
    positional = [a for a in wanted if not a.kwarg_only]
    assert len(args) <= len(positional), f"{len(args)} positional arguments for {schema}"
    given = {a.name: value for a, value in zip(positional, args, strict=False)}
    assert not given.keys() & keywords.keys()
    given |= keywords
    by_name = {a.name: a for a in wanted}
    assert given.keys() <= by_name.keys(), f"{given.keys() - by_name.keys()} are not in {schema}"
    for name, argument in by_name.items():
        if name not in given:
            assert argument.has_default_value(), f"{name} is missing for {schema}"
            continue
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if given[name] is not None or "Optional" not in str(argument.type):
            right = type(given[name]) in _TYPES[kind]
            assert right, f"{name} is {given[name]!r}, not {kind}"
    return given


class FakeOps:
    """The pair of ops of one release; computes on the CPU, in any floating dtype."""

    def __init__(self, release: str):
        self.schemas = SCHEMAS[release]

    def forward(self, *args: object, **keywords: object) -> tuple[Tensor, ...]:
        """out, lse [heads, rows], random state, an unused and a debug tensor."""
        a = bind(self.schemas[0], args, keywords)
        assert a["return_debug_mask"] is False
        out, lse, _, _ = fake_flash._flash_attn_varlen_forward(
            a["query"], a["key"], a["value"], a["cum_seq_q"], a["cum_seq_k"], a["max_q"],
            a["max_k"], a["dropout_p"], a["scale"], a["is_causal"],
            window_size_left=a["window_size_left"], window_size_right=a["window_size_right"],
        )  # fmt: skip
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse, state, torch.empty(0), torch.empty(0)

    def backward(self, *args: object, **keywords: object) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        a = bind(self.schemas[1], args, keywords)
        assert (a["rng_state"].dtype, a["rng_state"].shape) == (torch.uint64, (2,))
        query, key, value = a["query"], a["key"], a["value"]
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        fake_flash._flash_attn_varlen_backward(
            a["grad_out"], query, key, value, a["out"], a["logsumexp"], dq, dk, dv,
            a["cum_seq_q"], a["cum_seq_k"], a["max_q"], a["max_k"], a["dropout_p"], a["scale"],
            a["is_causal"], a["window_size_left"], a["window_size_right"], 0.0, None, False,
        )  # fmt: skip
        return dq, dk, dv
