"""What a rank holds of a microbatch: cut alike, routed completely, refused when it does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.bands import causal, window
from dynapar.catalog import load_model_shape
from dynapar.costs import load_costs
from dynapar.data.samples import IGNORE, LoadedSample, MediaShape
from dynapar.errors import SampleError
from dynapar.runtime.layout import ShardLayout, lay_out, unit_places
from dynapar.runtime.masks import MaskClass
from dynapar.schemes import Schemes
from tests.plans import hand_plan


def sample(number: int, parts: list[int | tuple[int, int, int]]) -> LoadedSample:
    """Text runs and media grids; token ids count up, so that each token tells where it was."""
    kinds: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            kinds += [0] * part
            continue
        groups, rows, columns = part
        kind, tokens = (1 if groups == 1 else 2), groups * rows * columns // 4
        media.append(MediaShape(kind, part, tokens, groups, 0.0 if groups == 1 else 1.0))
        kinds += [kind] * tokens
    length = len(kinds)
    ids = torch.arange(length) + 10_000 * number
    unit_sizes = [m.grid[1] * m.grid[2] for m in media for _ in range(m.units)]
    return LoadedSample(
        id=f"s{number}",
        input_ids=ids,
        targets=torch.cat([ids[1:], torch.tensor([IGNORE])]),
        kinds=torch.tensor(kinds),
        positions=ids.expand(3, -1),
        media=tuple(media),
        units={n: torch.full((size, 2), float(n)) for n, size in enumerate(unit_sizes)},
    )


SAMPLES = [
    sample(0, [5, (1, 4, 4), 3]),
    sample(1, [40]),
    sample(2, [2, (3, 4, 2), 1, (1, 2, 4), 2, (2, 2, 2)]),
    sample(3, [1]),
]


def layouts(degree: int, shares: dict[int, list[int]]) -> list[ShardLayout]:
    ranks = list(range(degree))
    plan = hand_plan(SAMPLES, degree, [(ranks, shares)])
    return [
        lay_out(
            plan.microbatches[0],
            dict(enumerate(SAMPLES)),
            rank=rank,
            masks=(MaskClass(),),
            bands=lambda s, mask: causal(len(s.input_ids)),
        )
        for rank in ranks
    ]


@given(st.integers(1, 5), st.data())
def test_every_token_is_on_one_rank_with_all_that_belongs_to_it(
    degree: int, data: st.DataObject
) -> None:
    shares = {
        row: data.draw(st.permutations(range(degree)))[: data.draw(st.integers(1, degree))]
        for row in range(len(SAMPLES))
    }
    shards = layouts(degree, shares)
    ids = torch.cat([shard.input_ids[: shard.tokens] for shard in shards])
    assert sorted(ids.tolist()) == sorted(torch.cat([s.input_ids for s in SAMPLES]).tolist())
    for shard in shards:
        real = slice(0, shard.tokens)
        assert torch.equal(shard.positions[:, real], shard.input_ids[real].expand(3, -1))
        learns = shard.targets[real] != IGNORE
        # Shifted before the cut: the target is the next token of the sample, wherever that lies.
        assert torch.equal(shard.targets[real][learns], shard.input_ids[real][learns] + 1)
        if shard.tokens == 0:
            assert shard.targets.tolist() == [IGNORE]


@given(st.integers(1, 5), st.data())
def test_each_row_arrives_once_at_the_placeholder_that_it_fills(
    degree: int, data: st.DataObject
) -> None:
    shares = {
        row: data.draw(st.permutations(range(degree)))[: data.draw(st.integers(1, degree))]
        for row in range(len(SAMPLES))
    }
    shards = layouts(degree, shares)
    # What each rank encodes, row by row: the id of the placeholder that the row belongs to.
    plan = hand_plan(SAMPLES, degree, [(list(range(degree)), shares)])
    encoded: list[list[int]] = [[] for _ in range(degree)]
    for placement in plan.microbatches[0].placements:
        whole = SAMPLES[placement.sample]
        for encoder, places in zip(placement.encoders, unit_places(whole), strict=True):
            encoded[encoder] += whole.input_ids[torch.from_numpy(places)].tolist()
    for here, shard in enumerate(shards):
        assert shard.route is not None
        arrived = []
        for there, other in enumerate(shards):
            assert other.route is not None
            rows = [encoded[there][row] for row in other.route.sends[here].tolist()]
            assert len(rows) == shard.route.counts[there]
            arrived += rows
        ordered = torch.tensor(arrived, dtype=torch.int64)[shard.route.order]
        assert torch.equal(shard.input_ids[shard.route.places], ordered)
        media = (shard.kinds[: shard.tokens] != 0).nonzero()[:, 0]
        assert torch.equal(shard.route.places, media)


def test_text_alone_routes_nothing() -> None:
    assert all(shard.route is None for shard in layouts(3, {1: [0, 1, 2], 3: [1]}))


def test_a_video_in_several_runs_fills_the_next_placeholders_of_its_kind() -> None:
    whole = sample(0, [1, (2, 2, 2), 1])
    torn = dataclasses.replace(whole, kinds=torch.tensor([2, 0, 0, 2]))
    assert [places.tolist() for places in unit_places(torn)] == [[0], [3]]


def test_placeholders_that_do_not_fit_the_media_are_refused() -> None:
    wrong = dataclasses.replace(SAMPLES[0], kinds=torch.zeros(len(SAMPLES[0].kinds)).long())
    with pytest.raises(SampleError, match="'s0' has 0 placeholders of kind 1 and its media fill 4"):
        unit_places(wrong)


def test_units_that_the_plan_does_not_place_are_refused() -> None:
    plan = hand_plan(SAMPLES, 1, [([0], {1: [0]})])
    with pytest.raises(SampleError, match="'s0' has 1 encoder units and the plan places 0"):
        lay_out(
            plan.microbatches[0],
            {1: SAMPLES[0]},
            rank=0,
            masks=(MaskClass(),),
            bands=lambda s, mask: causal(len(s.input_ids)),
        )


def test_auto_prices_what_the_masks_compute_and_move() -> None:
    """Per rank of the ring, against pairs and rows counted one by one; each class for itself."""
    samples = [sample(0, [900]), sample(1, [300]), sample(2, [37])]
    ranks, shares = [4, 5, 6, 7], {0: [4, 5, 6, 7], 1: [6, 5], 2: [7]}
    plan = hand_plan(samples, 8, [(ranks, shares)])
    masks = (MaskClass(), MaskClass(window=9))
    text = dataclasses.replace(load_model_shape("qwen2.5-vl-7b").text, kv_heads=28)
    schemes = Schemes(text=text, costs=load_costs(None), itemsize=2, ranks_per_node=8)
    asked: list[dict[str, Any]] = []
    of = Schemes.of

    def spy(self: Schemes, ranks: tuple[int, ...], **work: float) -> Any:
        asked.append({"ranks": ranks, **work})
        return of(self, ranks, **work)

    with patch.object(Schemes, "of", spy):
        shards = [
            lay_out(
                plan.microbatches[0],
                dict(enumerate(samples)),
                rank=rank,
                masks=masks,
                bands=lambda s, mask: (
                    window(len(s.input_ids), width=mask.window)
                    if mask.window
                    else causal(len(s.input_ids))
                ),
                schemes=schemes,
            )
            for rank in ranks
        ]
    assert asked[:2] * 4 == asked, "all ranks ask the same"
    lengths = [900, 300, 37]
    number = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    apart = place[:, None] - place[None, :]
    for mask, work in zip(masks, asked, strict=False):
        sees = (number[:, None] == number[None, :]) & (apart >= 0)
        if mask.window:
            sees &= apart < mask.window
        fetched = 0
        for shard in shards:
            mine = torch.zeros(sum(lengths), dtype=torch.bool)
            mine[torch.from_numpy(shard.plans[mask].index(shard.position))] = True
            fetched += int((sees[mine].any(0) & ~mine).sum())
        assert work == {
            "ranks": tuple(ranks),
            "tokens": sum(lengths) / 4,
            "pairs": int(sees.sum()) / 4,
            "needed": fetched / (3 * sum(lengths)),
        }
        chosen = of(schemes, **work)
        assert all(shard.plans[mask].scheme == chosen for shard in shards)
    assert {shard.scheme for shard in shards} == {"ulysses + staged"}
