"""The variables that hurt, in environments that are plain dicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynapar.doctor.finding import Finding
from dynapar.doctor.place import Place
from dynapar.doctor.settings import SETTINGS, check_settings, nccl_files

ALONE = Place(ranks=1, local_ranks=1, gpus=0, launched=False)
NODE = Place(ranks=8, local_ranks=8, gpus=8, launched=True)
CLUSTER = Place(ranks=16, local_ranks=8, gpus=8, launched=True)
GOOD = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def look(environ: dict[str, str], place: Place = CLUSTER, cores: int = 64) -> list[Finding]:
    return check_settings(environ, place, cores=cores)


def bad(environ: dict[str, str], place: Place = CLUSTER, cores: int = 64) -> dict[str, Finding]:
    return {row.check: row for row in look(environ, place, cores) if row.status != "ok"}


def test_nothing_set_hurts_nothing_but_the_allocator() -> None:
    assert set(bad({})) == {"allocator"}
    rows = look(GOOD)
    assert [row.found for row in rows] == [
        "PYTORCH_ALLOC_CONF is expandable_segments:True",
        f"{len(SETTINGS) + 1} variables looked at, none hurts",
    ]
    assert bad({}, ALONE) == {}


HURTS = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_OPT": "0",
    "NUMBA_BOUNDSCHECK": "1",
    "OMP_PROC_BIND": "close",
    "GOMP_CPU_AFFINITY": "0-3",
    "TOKENIZERS_PARALLELISM": "true",
}
HARMLESS = {
    "CUDA_LAUNCH_BLOCKING": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_P2P_LEVEL": "NVL",
    "TORCH_NCCL_BLOCKING_WAIT": "false",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "NUMBA_OPT": "3",
    "OMP_PROC_BIND": "FALSE",
    "GOMP_CPU_AFFINITY": "",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "8",
}
FATAL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "NUMBA_DISABLE_JIT"}


def test_every_setting_is_tested() -> None:
    assert list(HURTS) == [setting.name for setting in SETTINGS]


@pytest.mark.parametrize("name", HURTS)
def test_a_value_that_hurts_is_named_with_its_source(name: str) -> None:
    (row,) = bad(GOOD | {name: HURTS[name]}).values()
    assert row.check == name
    assert row.status == ("fail" if name in FATAL else "warn")
    assert row.found.startswith(f"{HURTS[name]}: ")
    assert row.do == f"unset {name}"
    assert re.match(r"https://[a-z.]+/\S+$", row.source)


def test_other_values_are_left_alone() -> None:
    assert bad(GOOD | HARMLESS) == {}


@pytest.mark.parametrize(
    ("place", "silent"),
    [
        (NODE, {"NCCL_IB_DISABLE"}),
        (
            ALONE,
            {name for name in HURTS if re.search("NCCL|CUDA|TF32", name)}
            | {"OMP_PROC_BIND", "GOMP_CPU_AFFINITY"},
        ),
    ],
    ids=["node", "alone"],
)
def test_what_does_not_matter_here_is_not_said(place: Place, silent: set[str]) -> None:
    assert set(bad(GOOD | HURTS, place)) == set(HURTS) - silent


def test_threads_of_many_ranks_take_turns() -> None:
    (row,) = bad(GOOD | {"OMP_NUM_THREADS": "16"}).values()
    assert row.found == (
        "16 threads for each of 8 ranks on 64 cores: they take turns, and measured times mean "
        "little"
    )
    assert row.do == "set OMP_NUM_THREADS to 8"
    (row,) = bad(GOOD | {"OMP_NUM_THREADS": "2"}, cores=4).values()
    assert row.do == "set OMP_NUM_THREADS to 1"
    assert bad(GOOD | {"OMP_NUM_THREADS": "many"}) == {}


@pytest.mark.parametrize(
    ("environ", "do"),
    [
        ({}, "set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False, roundup_power2_divisions:4"},
            "set PYTORCH_ALLOC_CONF=expandable_segments:True,roundup_power2_divisions:4",
        ),
    ],
)
def test_an_allocator_that_fragments_is_told_what_to_set(environ: dict[str, str], do: str) -> None:
    (row,) = bad(environ).values()
    assert (row.check, row.do) == ("allocator", do)
    assert "without expandable_segments: shapes change with every step" in row.found


def test_the_new_name_of_the_allocators_variable_wins() -> None:
    old = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert bad(old) == {}
    assert set(bad({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"} | old)) == {"allocator"}


def test_nccls_own_files_are_read_as_nccl_does(tmp_path: Path) -> None:
    system, own, given = (tmp_path / name for name in ("nccl.conf", ".nccl.conf", "given.conf"))
    assert nccl_files({}, home=tmp_path, system=system) == {}
    system.write_text("NCCL_DEBUG=WARN\n# NCCL_ALGO=Ring\nNCCL_IB_DISABLE = 1\n\nnonsense\n")
    own.write_text("NCCL_IB_DISABLE=0\nNCCL_P2P_DISABLE=1\n")
    given.write_text("NCCL_SHM_DISABLE=1\n")
    assert nccl_files({"NCCL_DEBUG": "INFO"}, home=tmp_path, system=system) == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_P2P_DISABLE": "1",
    }
    files = nccl_files({"NCCL_CONF_FILE": str(given)}, home=tmp_path, system=system)
    assert files == {"NCCL_SHM_DISABLE": "1", "NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1"}
    rows = check_settings(GOOD, CLUSTER, cores=64, files=files)
    assert [(row.check, row.do) for row in rows[1:]] == [
        ("NCCL_SHM_DISABLE in a file", "take NCCL_SHM_DISABLE out of NCCL's files"),
        ("NCCL_IB_DISABLE in a file", "take NCCL_IB_DISABLE out of NCCL's files"),
    ]
