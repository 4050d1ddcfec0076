"""Trees are joined of members, each with the media that its ranks encode; members may be lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dynapar.catalog import load_model_shape
from dynapar.costs import load_costs
from dynapar.data.grouped import GroupSampler
from dynapar.data.index import Index, build_index, read_index
from dynapar.data.loader import LoadedStep, StepLoader
from dynapar.data.materialize import Materializer
from dynapar.data.pieces import member_units
from dynapar.data.samples import IGNORE, LoadedSample
from dynapar.data.sources import open_source
from dynapar.data.trees import join_members
from dynapar.errors import SampleError
from dynapar.train.config import RunConfig, read_run_config
from dynapar.train.setup import make_planner
from tests.data.small import noise, said, write_lines
from tests.train.tiny import write_model
from tests.verify.tree_run import asked, write_run

RANKS = 3


@given(st.integers(0, 4), st.lists(st.integers(0, 4), min_size=2, max_size=5), st.data())
def test_each_unit_of_a_tree_is_one_of_a_member(
    shared: int, branches: list[int], data: st.DataObject
) -> None:
    count = shared + sum(branches)
    units = data.draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count))
    units = {unit for unit in units if unit < count}
    found, begin = set(), 0
    for member, own in enumerate(member_units(frozenset(units), shared, branches)):
        assert member == 0 or all(unit >= shared for unit in own)
        assert all(unit < shared + branches[member] for unit in own)
        found |= {unit if unit < shared else unit + begin for unit in own}
        begin += branches[member]
    assert found == units


class Run:
    """A run's data, opened; its three ranks load in this process, without a control plane."""

    def __init__(self, folder: Path) -> None:
        self.config: RunConfig = read_run_config(write_run(folder))
        self.index: Index = read_index(self.config.index)
        self.folder = folder
        source = open_source(self.config.source)
        shape = load_model_shape(str(self.config.model))
        self.quarantine = folder / "quarantine.jsonl"
        self.materializer = Materializer(shape, source, self.index, quarantine=self.quarantine)

    def step(self, rank: int) -> LoadedStep:
        prefixes = self.index.table.prefixes
        assert prefixes is not None
        plan = make_planner(self.config, costs=load_costs(None), ranks=RANKS)
        sampler = GroupSampler(prefixes.ids, global_batch=12, seed=3)
        with StepLoader(
            index=self.index,
            sampler=sampler,
            materializer=self.materializer,
            plan=plan,
            rank=rank,
            steps=1,
            stub_limit=1.0,
        ) as loader:
            return next(loader)

    def rewrite(self, name: str, old: str, new: str) -> None:
        """Change a sample in the file that is open already; all keep their places."""
        path = Path(self.config.source)
        lines = path.read_text().splitlines(keepends=True)
        place = next(n for n, line in enumerate(lines) if json.loads(line)["id"] == name)
        assert len(old) == len(new)
        lines[place] = lines[place].replace(old, new, 1)
        path.write_text("".join(lines))


def trees_of(step: LoadedStep) -> dict[str, tuple[int, LoadedSample]]:
    """By prefix: the row and the loaded tree, of those that a rank has."""
    trees = step.plan.samples.trees
    assert trees is not None
    rows = [row for row in trees.rows.tolist() if row in step.samples]
    return {trees.prefix_ids[row]: (row, step.samples[row]) for row in rows}


def test_ranks_load_the_trees_of_their_microbatches(tmp_path: Path) -> None:
    run = Run(tmp_path)
    steps = [run.step(rank) for rank in range(RANKS)]
    table = steps[0].plan.samples
    assert table.trees is not None
    assert len(table) == 5
    assert len(table.trees.rows) == 3
    assert len(steps[0].rows) == 12
    labels = int(run.index.table.label_tokens.sum())
    assert sum(step.own_targets for step in steps) == labels == table.label_tokens.sum()
    for micro in steps[0].plan.microbatches:
        for placement in micro.placements:
            row = placement.sample
            loaded = [steps[rank].samples[row] for rank in micro.ranks]
            for rank, sample in zip(micro.ranks, loaded, strict=True):
                assert sample.id == table.ids[row]
                assert len(sample.input_ids) == table.llm_tokens[row]
                assert int((sample.targets != IGNORE).sum()) == table.label_tokens[row]
                assert sum(item.units for item in sample.media) == len(table.units(row))
                assert sample.input_ids.equal(loaded[0].input_ids)
                assert all(placement.encoders[unit] == rank for unit in sample.units)
                for unit, patches in sample.units.items():
                    assert len(patches) == table.units(row)[unit]
            units = [unit for sample in loaded for unit in sample.units]
            assert sorted(units) == list(range(len(table.units(row))))


def test_the_patches_of_a_tree_are_those_of_its_members(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found: dict[str, dict[int, Tensor]] = {}
    for rank in range(RANKS):
        for name, (_, sample) in trees_of(run.step(rank)).items():
            found.setdefault(name, {}).update(sample.units)
    table = run.index.table
    for name, ids in (("picture", "image"), ("clip", "video")):
        rows = [row for row, each in enumerate(table.ids) if each.startswith(ids)]
        whole = [
            run.materializer.load(row, units=frozenset(range(len(table.units(row)))))
            for row in rows
        ]
        assert table.prefixes is not None
        shared = int(table.prefixes.units[rows[0]])
        expected = [whole[0].units[unit] for unit in range(shared)]
        own = {
            tuple(patches.flatten().tolist())
            for sample in whole
            for unit, patches in sample.units.items()
            if unit >= shared
        }
        for unit, patches in enumerate(expected):
            assert found[name][unit].equal(patches)
        rest = {tuple(p.flatten().tolist()) for u, p in found[name].items() if u >= shared}
        assert rest == own


@pytest.mark.parametrize(
    ("lost", "old", "new", "reason"),
    [
        # The first member of a tree brings the picture, if it can be loaded.
        ("image0", "assistant", "assistanx", "role 'assistanx'"),
        ("image1", "assistant", "assistanx", "role 'assistanx'"),
        ("image3", "what is it", "what is at", "share a prefix of"),
        ("text0", "assistant", "assistanx", "role 'assistanx'"),
    ],
)
def test_a_member_that_cannot_be_loaded_is_the_only_one_lost(
    tmp_path: Path, lost: str, old: str, new: str, reason: str
) -> None:
    run = Run(tmp_path)
    good = [run.step(rank) for rank in range(RANKS)]
    run.rewrite(lost, old, new)
    bad = [run.step(rank) for rank in range(RANKS)]
    targets = int(run.index.table.label_tokens[run.index.table.ids.index(lost)])
    assert sum(s.own_targets for s in bad) == sum(s.own_targets for s in good) - targets
    assert {name for step in bad for name in step.stubs} == {lost}
    reports = [json.loads(line) for line in run.quarantine.read_text().splitlines()]
    assert {report["id"] for report in reports} == {lost}
    assert all(reason in report["reason"] for report in reports)
    for before, after in zip(good, bad, strict=True):
        for name, (_, tree) in trees_of(before).items():
            _, now = trees_of(after)[name]
            assert now.tree == tree.tree
            assert not now.stub
            for unit, patches in tree.units.items():
                assert now.units[unit].equal(patches)


def test_members_that_differ_in_the_prefix_are_not_joined() -> None:
    one, other = (
        LoadedSample(
            id=name,
            input_ids=torch.tensor(ids),
            targets=torch.tensor([IGNORE] * len(ids)),
            kinds=torch.zeros(len(ids), dtype=torch.int64),
            positions=torch.arange(len(ids))[None],
            media=(),
            units={},
        )
        for name, ids in (("a", [1, 2, 3, 4]), ("b", [1, 2, 9]))
    )
    tree = join_members("a", [one, other], prefix_tokens=2, prefix_units=0)
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 9]
    assert tree.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert tree.tree == ((2, -1), (2, 0), (1, 0))
    with pytest.raises(SampleError) as caught:
        join_members("a", [one, one, other], prefix_tokens=3, prefix_units=0)
    assert str(caught.value) == (
        "samples 'a' and 'b' share a prefix of 3 tokens, and their input_ids differ at token 2: 3 "
        "and 9; expected the same tokens and media. Shorten the prefix, or give one of them "
        "another prefix id"
    )


def shared_by(tmp_path: Path, model: Path, samples: list[dict[str, object]]) -> Index:
    path = write_lines(tmp_path / "a.jsonl", samples)
    build_index(open_source(str(path)), load_model_shape(str(model)), tmp_path / "i.parquet")
    return read_index(tmp_path / "i.parquet")


def test_a_prefix_ends_where_samples_or_their_media_differ(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    noise(16, 16, seed=0).save(tmp_path / "a.png")
    noise(16, 16, seed=1).save(tmp_path / "b.png")

    def sample(name: str, prefix: str, text: str, *images: str) -> dict[str, object]:
        turns = [asked(text), said("ja")]
        return {"id": name, "messages": turns, "images": list(images), "prefix": prefix}

    index = shared_by(
        tmp_path,
        model,
        [
            sample("s0", "same", "look <image> and <image>", "a.png", "b.png"),
            sample("s1", "same", "look <image> and <image>", "a.png", "a.png"),
            sample("s2", "text", "abcdef"),
            sample("s3", "text", "abcxyz"),
            sample("s4", "short", "abc"),
            {
                "id": "s5",
                "messages": [asked("abc"), said("ja"), asked("and"), said("no")],
                "prefix": "short",
            },
            {"id": "s6", "messages": [said("ja")]},
        ],
    )
    prefixes = index.table.prefixes
    assert prefixes is not None
    assert prefixes.ids == ("same", "same", "text", "text", "short", "short", "")
    # The pictures are alike in size, so that all tokens are; the second ones are other files.
    tokens = index.table.llm_tokens
    assert tokens[0] == tokens[1]
    assert prefixes.units.tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert prefixes.tokens[4] == tokens[4] - 1
    source = open_source(str(tmp_path / "a.jsonl"))
    loader = Materializer(load_model_shape(str(model)), source, index)
    loaded = [loader.load(row, units=frozenset()).input_ids for row in range(7)]
    for one, other in ((0, 1), (2, 3), (4, 5)):
        size = int(prefixes.tokens[one])
        assert size == prefixes.tokens[other]
        assert loaded[one][:size].equal(loaded[other][:size])
    size = int(prefixes.tokens[2])
    assert loaded[2][size] != loaded[3][size]
    assert (
        index.fingerprint
        != shared_by(
            tmp_path, model, [sample("s0", "", "abc"), sample("s1", "", "abc")]
        ).fingerprint
    )


def test_an_index_without_prefixes_has_none(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    samples: list[dict[str, object]] = [{"id": "a", "messages": [asked("b"), said("c")]}]
    assert shared_by(tmp_path, model, samples).table.prefixes is None
    samples[0]["prefix"] = {"id": "p"}
    with pytest.raises(SampleError, match=r"'prefix' is {'id': 'p'}; expected the id of a prefix"):
        shared_by(tmp_path, model, samples)
