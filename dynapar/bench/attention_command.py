"""`dynapar bench attention`: read what to measure, and show what was found."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Sequence

import numpy as np
import torch

import dynapar
from dynapar.bench.attention import AttentionCase, AttentionResult, measure
from dynapar.bench.attention_peers import PEERS
from dynapar.console import Cell, show_json, show_table
from dynapar.errors import ConfigError


def attention_command(
    *,
    lengths: str,
    degrees: str,
    mask: str,
    dtype: str,
    heads: str,
    scheme: str,
    turns: int,
    peers: bool,
    json: bool,
) -> None:
    """Measure each degree and print a table, or one JSON value.

    Args:
        lengths: Tokens of each sequence, separated by commas; "80*100" is 100 of 80, "60~90" is 60
            from a log-normal distribution with median 90 and sigma 0.8.
        degrees: Ranks of the rings, separated by commas.
        mask: As in `AttentionCase`.
        dtype: As in `AttentionCase`.
        heads: Query heads, key/value heads and width.
        scheme: As in `AttentionCase`.
        turns: How often each is run.
        peers: Whether other rings run too.
        json: Print JSON.

    Raises:
        ConfigError: Something cannot be read or run.
    """
    query_heads, kv_heads, width = _heads(heads)
    counted = _lengths(lengths)
    cases = [
        AttentionCase(
            lengths=counted,
            degree=degree,
            mask=mask,
            dtype=dtype,
            heads=(query_heads, kv_heads, width),
            scheme=scheme if degree > 1 else "auto",
            turns=turns,
            peers=tuple(PEERS) if peers else (),
        )
        for degree in _counts("degrees", degrees)
    ]
    results = [result for case in cases for result in measure(case)]
    if json:
        show_json(_as_json(cases[0], results))
        return
    many = lengths if len(counted) <= 8 else f"{len(counted)} sequences"
    show_table(
        f"{mask} attention of {many}, {sum(counted):,} tokens, heads {heads}, {dtype}: CPU time of "
        "the slowest rank, forward and backward; x: of one device's rate",
        [_row(result) for result in results if result.refused is None],
    )
    for result in results:
        if result.refused is not None:
            print(f"{result.what} at degree {result.degree} does not run: {result.refused}")


def _row(result: AttentionResult) -> dict[str, Cell]:
    def cell(value: float | None) -> Cell:
        return "-" if value is None else f"{value:.3f}"

    return {
        "what": result.what,
        "degree": result.degree,
        "ms": f"{result.seconds * 1e3:.1f}",
        "x sdpa": cell(result.throughput),
        "x op": cell(result.of_op),
        "time / (degree 1 / d)": cell(result.of_degree_1),
        "all ranks at once": cell(result.of_crowded_degree_1),
        "with transport": cell(result.with_transport),
        "work": cell(result.work),
        "bytes / needed": cell(result.sent),
        "a ring's": cell(result.ring_sends),
    }


def _as_json(case: AttentionCase, results: Sequence[AttentionResult]) -> dict[str, object]:
    return {
        "bench": "attention",
        "mask": case.mask,
        "lengths": list(case.lengths),
        "tokens": sum(case.lengths),
        "heads": list(case.heads),
        "dtype": case.dtype,
        "scheme": case.scheme,
        "turns": case.turns,
        "results": [
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in dataclasses.asdict(result).items()
                if value is not None
            }
            for result in results
        ],
        "dynapar": dynapar.__version__,
        "torch": torch.__version__,
        "cpu": platform.machine(),
    }


def _lengths(text: str) -> tuple[int, ...]:
    lengths: list[int] = []
    for part in text.split(","):
        if "~" in part:
            count, median = _counts("lengths", part.replace("~", ","))
            drawn = np.random.default_rng(0).lognormal(math.log(median), 0.8, count)
            lengths += np.maximum(1, drawn.astype(np.int64)).tolist()
            continue
        length, _, times = part.partition("*")
        lengths += list(_counts("lengths", length)) * _counts("lengths", times or "1")[0]
    return tuple(lengths)


def _heads(text: str) -> tuple[int, int, int]:
    heads = _counts("heads", text)
    if len(heads) != 3 or heads[0] % heads[1]:
        raise ConfigError(
            f"heads are {text!r}; expected query heads, key/value heads that divide them, and the "
            "width of a head: for instance 8,2,64"
        )
    return heads[0], heads[1], heads[2]


def _counts(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"{name} are {text!r}; expected whole numbers above 0, separated by commas"
        )
    return tuple(int(part) for part in parts)
