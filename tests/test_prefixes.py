from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.trees import tree
from dynapar.catalog import load_model_shape
from dynapar.errors import SampleError
from dynapar.meta import SampleTable, read_metadata_jsonl
from dynapar.prefixes import Trees
from tests.prefixed import Group, prefixed

IMAGE: dict[str, object] = {"kind": "image", "llm_tokens": 40, "encoder_tokens": 160}
SMALL: dict[str, object] = {"kind": "image", "llm_tokens": 9, "encoder_tokens": 36}


def read(path: Path, *rows: dict[str, Any]) -> SampleTable:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_metadata_jsonl(path)


def line(name: str, text: int, media: Sequence[object] = (), /, **prefix: object) -> dict[str, Any]:
    return {"id": name, "text_tokens": text, "media": list(media), "prefix": prefix}


def test_a_prefix_holds_the_first_media_that_fit_into_it(tmp_path: Path) -> None:
    table = read(
        tmp_path / "m.jsonl",
        line("a", 30, [IMAGE, SMALL], id="img7", tokens=42),
        {"id": "b", "text_tokens": 5},
        line("c", 80, [IMAGE], id="img7", tokens=42),
        line("d", 80, [SMALL], id="text", tokens=50, media=0),
        line("e", 20, [IMAGE, SMALL], id="both", tokens=60),
    )
    assert table.prefixes is not None
    assert table.prefixes.ids == ("img7", "", "img7", "text", "both")
    assert table.prefixes.tokens.tolist() == [42, 0, 42, 50, 60]
    assert table.prefixes.text_tokens.tolist() == [2, 0, 2, 50, 11]
    assert table.prefixes.units.tolist() == [1, 0, 1, 0, 2]


def test_prefixes_move_with_their_samples(tmp_path: Path) -> None:
    table = read(
        tmp_path / "m.jsonl",
        {"id": "a", "text_tokens": 5},
        line("b", 80, id="p", tokens=50),
    )
    drawn = table.draw(np.array([1, 0, 1]))
    assert drawn.ids == ("b", "a", "b#2")
    assert drawn.prefixes is not None
    assert drawn.prefixes.ids == ("p", "", "p")
    assert drawn.prefixes.tokens.tolist() == [50, 0, 50]
    assert table.take(np.array([1, 0])).prefixes == drawn.take(np.array([0, 1])).prefixes
    assert table.prefixes != drawn.prefixes


def test_tokens_of_media_by_size_count_with_their_boundaries(tmp_path: Path) -> None:
    shape = load_model_shape("qwen2.5-vl-7b")
    image = {"kind": "image", "height": 280, "width": 280}
    made = shape.image(280, 280)
    whole = made.llm_tokens + made.boundary_tokens
    path = tmp_path / "m.jsonl"
    rows = [
        line("a", 30, [image], id="p", tokens=whole),
        line("b", 9, [image], id="q", tokens=whole - 1),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    prefixes = read_metadata_jsonl(path, shape).prefixes
    assert prefixes is not None
    assert prefixes.units.tolist() == [1]
    assert prefixes.text_tokens.tolist() == [made.boundary_tokens]
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(SampleError, match="a media item that ends after the prefix cannot lie in"):
        read_metadata_jsonl(path, shape)


SAMPLE = "line 1: sample 'a' "


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (7, SAMPLE + 'has prefix 7; expected {"id": ..., "tokens": ...}'),
        ({"tokens": 5}, SAMPLE + "has prefix.id None; expected a text"),
        ({"id": "", "tokens": 5}, SAMPLE + "has prefix.id ''; expected a text"),
        (
            {"id": "p", "tokens": 5, "length": 1},
            SAMPLE + "has prefix.length; expected id, tokens, and perhaps media",
        ),
        *(
            (
                {"id": "p", "tokens": tokens},
                SAMPLE + f"of 60 tokens has prefix.tokens {tokens!r}; expected a whole number, 1 "
                "or more and below the sample's tokens: shorten the prefix, or leave it out",
            )
            for tokens in (0, -3, 60, 61, 4.5, True, None)
        ),
        (
            {"id": "p", "tokens": 45, "media": 2},
            SAMPLE + "has prefix.media 2; expected a number of its 1 media items",
        ),
        (
            {"id": "p", "tokens": 30, "media": 1},
            SAMPLE + "has prefix.tokens 30, but its first 1 media items take 40; expected at least "
            "that: count fewer of them in prefix.media",
        ),
        (
            {"id": "p", "tokens": 30},
            SAMPLE + "has prefix.tokens 30, of which 30 would be text, and it has 20 text tokens; "
            "expected no more: a media item that ends after the prefix cannot lie in it, so count "
            "more of them in prefix.media, or shorten the prefix",
        ),
    ],
)
def test_a_prefix_that_cannot_be_is_named(tmp_path: Path, prefix: object, message: str) -> None:
    row = {"id": "a", "text_tokens": 20, "media": [IMAGE], "prefix": prefix}
    with pytest.raises(SampleError) as caught:
        read(tmp_path / "m.jsonl", row)
    assert str(caught.value) == f"{tmp_path / 'm.jsonl'}, {message}"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (line("b", 30, [IMAGE], id="p", tokens=43), "43 tokens"),
        (line("b", 70, [IMAGE], id="p", tokens=42, media=0), "42 text tokens"),
        (
            line("b", 70, [{**IMAGE, "encoder_tokens": 9}], id="p", tokens=42),
            "[9] encoder units",
        ),
    ],
)
def test_samples_that_differ_in_their_prefix_are_named(
    tmp_path: Path, other: dict[str, Any], what: str
) -> None:
    own = {"43 tokens": "42", "42 text tokens": "2", "[9] encoder units": "[160]"}[what]
    with pytest.raises(SampleError) as caught:
        read(tmp_path / "m.jsonl", line("a", 30, [IMAGE], id="p", tokens=42), other)
    assert str(caught.value) == (
        f"sample 'b' has {what} in prefix 'p', sample 'a' has {own}; expected the same in all "
        f"samples of a prefix: give one of them another prefix id"
    )


def seen_pairs(prefix: int, branches: Sequence[int]) -> int:
    """Counted one by one on the tree's mask."""
    tokens = prefix + sum(branches)
    seen = np.zeros((tokens, tokens), np.int64)
    for q0, q1, k0, k1, low, high in tree([prefix, *branches], [-1, *[0] * len(branches)]):
        apart = np.arange(q0, q1)[:, None] - np.arange(k0, k1)[None]
        seen[q0:q1, k0:k1] += (apart >= low) & (apart <= high)
    assert seen.max() == 1
    return int(seen.sum())


@given(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_the_reach_of_a_tree_counts_its_pairs(prefix: int, branches: list[int]) -> None:
    count = len(branches)
    trees = Trees(
        prefix_ids=("", "p", ""),
        prefix_tokens=np.array([0, prefix, 0]),
        prefix_units=np.zeros(3, np.int64),
        offsets=np.array([0, 0, count, count]),
        member_ids=tuple(f"m{i}" for i in range(count)),
        member_tokens=prefix + np.array(branches),
        member_labels=np.zeros(count, np.int64),
        member_units=np.zeros(count, np.int64),
    )
    tokens = np.array([17, prefix + sum(branches), 5])
    plain = prefixed([Group(0, tuple(tokens.tolist()))])
    table = replace(plain, trees=trees)
    assert plain.reach.tolist() == tokens.tolist()
    pairs = seen_pairs(prefix, branches)
    assert table.reach[[0, 2]].tolist() == [17, 5]
    assert table.reach[1] == (2 * pairs - tokens[1]) / tokens[1]
    assert pairs == prefix * (prefix + 1) // 2 + sum(
        prefix * b + b * (b + 1) // 2 for b in branches
    )
