"""Trees in a plan's JSON form: keys that samples have besides, and only where they are trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from dynapar.meta import SampleTable
from dynapar.plan.columns import offsets_of
from dynapar.plan.schema import Json, Schema
from dynapar.prefixes import Trees

_PREFIX = ("tokens", "encoder_units")
_MEMBER = ("tokens", "label_tokens", "encoder_units")
TREE: Mapping[str, Schema] = {
    "prefix": {"id": "string", **dict.fromkeys(_PREFIX, "integer")},
    "members": [{"id": "string", **dict.fromkeys(_MEMBER, "integer")}],
}
"""The schema of what a tree's record has besides: the prefix, and the samples that share it; with
LLM tokens (a member's include the prefix) and numbers of encoder units (a member's do not)."""


def tree_to_json(trees: Trees | None, row: int) -> dict[str, Json]:
    """What the record of a sample has besides; nothing where it is no tree."""
    if trees is None or not trees.prefix_ids[row]:
        return {}
    own = trees.members(row)
    members = zip(
        trees.member_ids[own],
        trees.member_tokens[own].tolist(),
        trees.member_labels[own].tolist(),
        trees.member_units[own].tolist(),
        strict=True,
    )
    return {
        "prefix": {
            "id": trees.prefix_ids[row],
            "tokens": int(trees.prefix_tokens[row]),
            "encoder_units": int(trees.prefix_units[row]),
        },
        "members": [
            {"id": name, "tokens": tokens, "label_tokens": labels, "encoder_units": units}
            for name, tokens, labels, units in members
        ],
    }


def trees_from_json(records: Sequence[Mapping[str, object]]) -> Trees | None:
    """What `tree_to_json` wrote into sample records of a form that is known to be whole."""
    if not any("prefix" in record for record in records):
        return None
    none: dict[str, object] = {"id": "", "tokens": 0, "encoder_units": 0}
    prefixes = [cast(dict[str, object], record.get("prefix", none)) for record in records]
    lists = [cast(list[dict[str, object]], record.get("members", [])) for record in records]
    members = [member for each in lists for member in each]

    def column(rows: Sequence[Mapping[str, object]], key: str) -> np.ndarray:
        return np.array([cast(int, row[key]) for row in rows], np.int64)

    return Trees(
        prefix_ids=tuple(str(prefix["id"]) for prefix in prefixes),
        prefix_tokens=column(prefixes, "tokens"),
        prefix_units=column(prefixes, "encoder_units"),
        offsets=offsets_of(np.array([len(each) for each in lists], np.int64)),
        member_ids=tuple(str(member["id"]) for member in members),
        member_tokens=column(members, "tokens"),
        member_labels=column(members, "label_tokens"),
        member_units=column(members, "encoder_units"),
    )


def tree_problems(table: SampleTable) -> Iterator[str]:
    """What is wrong with the trees of a plan's samples, whose own columns are sound."""
    trees = table.trees
    if trees is None:
        return
    if problems := list(_column_problems(trees, len(table))):
        yield from problems
        return
    names = [*(name for row, name in enumerate(table.ids) if not trees.prefix_ids[row])]
    names += trees.member_ids
    if len(set(names)) != len(names):
        twice = sorted(names)
        again = next(a for a, b in pairwise(twice) if a == b)
        yield f"sample {again!r} is in the step twice, alone or as a member of trees"
    units = np.diff(table.unit_offsets)
    for row in trees.rows.tolist():
        own, name = trees.members(row), f"tree {table.ids[row]!r}"
        shared, tokens = int(trees.prefix_tokens[row]), trees.member_tokens[own]
        labels, branches = trees.member_labels[own], trees.member_units[own]
        whole = shared + int((tokens - shared).sum())
        if shared < 1 or (tokens <= shared).any():
            yield (
                f"{name} has members of {tokens.tolist()} tokens; expected more than its prefix's "
                f"{shared}, and 1 or more there"
            )
        elif whole != table.llm_tokens[row]:
            yield f"{name} has {table.llm_tokens[row]} llm_tokens; its members make {whole}"
        if (labels < 0).any() or (labels >= tokens).any():
            yield f"{name} has members of {labels.tolist()} targets in {tokens.tolist()} tokens"
        elif (total := int(labels.sum())) != table.label_tokens[row]:
            yield f"{name} has {table.label_tokens[row]} label_tokens; its members have {total}"
        counted = int(trees.prefix_units[row] + branches.sum())
        if trees.prefix_units[row] < 0 or (branches < 0).any() or counted != units[row]:
            yield f"{name} has {units[row]} encoder units; prefix and members have {counted}"


def _column_problems(trees: Trees, rows: int) -> Iterator[str]:
    lengths = {len(trees.prefix_ids), len(trees.prefix_tokens), len(trees.prefix_units)}
    if lengths | {len(trees.offsets) - 1} != {rows}:
        yield f"the columns of trees do not all have {rows} rows, one a sample"
        return
    members = len(trees.member_ids)
    columns = (trees.member_tokens, trees.member_labels, trees.member_units)
    if any(len(column) != members for column in columns) or trees.offsets[-1] != members:
        yield f"the columns of members do not all have {members} rows"
        return
    counts = np.diff(trees.offsets)
    for row, name in enumerate(trees.prefix_ids):
        if bool(name) != bool(counts[row]) or counts[row] == 1:
            yield (
                f"sample {row} has prefix {name!r} and {counts[row]} members; expected two or more "
                f"with a prefix, none without"
            )
