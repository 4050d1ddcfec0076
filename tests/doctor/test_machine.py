from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dynapar.packing
from dynapar.doctor.finding import Finding
from dynapar.doctor.machine import (
    Limits,
    cache_folders,
    check_cache,
    check_limits,
    find_limits,
)
from dynapar.doctor.place import Place

ALONE = Place(ranks=1, local_ranks=1, gpus=0, launched=False)
NODE = Place(ranks=8, local_ranks=8, gpus=8, launched=True)
CLUSTER = Place(ranks=1024, local_ranks=8, gpus=8, launched=True)
LIMITS = Limits(
    cores=64, files=65_536, shared_memory=16 << 30, locked_memory=None, address="10.0.0.3"
)


def rows(limits: Limits, place: Place, environ: dict[str, str] | None = None) -> dict[str, Finding]:
    return {row.check: row for row in check_limits(limits, place, environ or {})}


def test_good_limits() -> None:
    assert {row.status for row in rows(LIMITS, CLUSTER).values()} == {"ok"}
    assert set(rows(LIMITS, CLUSTER)) == {"open files", "shared memory", "gloo's network"}
    assert set(rows(LIMITS, NODE)) == {"open files", "shared memory"}
    assert set(rows(replace(LIMITS, shared_memory=None), ALONE)) == {"open files"}
    assert rows(replace(LIMITS, files=1 << 62), ALONE)["open files"].found == "no limit"


def test_this_process_has_limits() -> None:
    limits = find_limits()
    assert limits.cores >= 1
    assert limits.files >= 64


def test_too_few_open_files() -> None:
    row = rows(replace(LIMITS, files=1024), CLUSTER)["open files"]
    assert row.status == "warn"
    assert row.found == "at most 1,024; 1,024 ranks may need 4,608 each"
    assert row.do == "ulimit -n 65536 in the shell that starts the run"
    assert rows(replace(LIMITS, files=1024), NODE)["open files"].status == "ok"


def test_a_containers_shared_memory() -> None:
    row = rows(replace(LIMITS, shared_memory=64 << 20), NODE)["shared memory"]
    assert row.status == "warn"
    assert row.found.startswith("/dev/shm has 64 MiB; NCCL keeps")
    assert "--shm-size=1g" in row.do
    row = rows(replace(LIMITS, shared_memory=None), NODE)["shared memory"]
    assert row.found.startswith("there is no /dev/shm; ")


def test_memory_that_cannot_be_locked() -> None:
    row = rows(replace(LIMITS, locked_memory=64 << 10), CLUSTER)["locked memory"]
    assert (row.status, row.do) == ("warn", "start the container with --ulimit memlock=-1")
    assert row.found.startswith("at most 64 KiB; ")


def test_a_machine_whose_name_means_itself_cannot_be_reached() -> None:
    for address, text in (("127.0.1.1", "127.0.1.1"), (None, "no address")):
        limits = replace(LIMITS, address=address)
        row = rows(limits, CLUSTER)["gloo's network"]
        assert row.status == "fail"
        assert row.found.startswith(f"this machine's name means {text} on it: ranks of other")
        named = rows(limits, CLUSTER, {"GLOO_SOCKET_IFNAME": "eth0"})["gloo's network"]
        assert (named.status, named.found) == ("ok", "GLOO_SOCKET_IFNAME is eth0")


def test_the_caches_folders_are_numbas_in_its_order(tmp_path: Path) -> None:
    own = Path(str(dynapar.packing.__file__)).parent / "__pycache__"
    assert cache_folders({}, home=tmp_path) == [own, tmp_path / ".cache" / "numba"]
    environ = {"NUMBA_CACHE_DIR": "/fast/numba", "XDG_CACHE_HOME": "/caches"}
    assert cache_folders(environ, home=tmp_path) == [
        Path("/fast/numba"),
        own,
        Path("/caches/numba"),
    ]


def test_the_planners_own_kernels_are_in_the_first_of_them() -> None:
    """As numba itself answers."""
    from dynapar.packing.ticks import sample_ticks

    stats = sample_ticks.stats  # type: ignore[attr-defined]
    assert Path(stats.cache_path).resolve() == cache_folders({}, home=Path("/"))[0].resolve()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    closed = tmp_path / "file" / "numba"
    good = tmp_path / "good"
    assert check_cache([good, closed]).found == f"kept in {good}"
    row = check_cache([closed, good])
    assert row.status == "warn"
    assert row.found == f"kept in {good}, since {closed} cannot be written (Not a directory)"
    row = check_cache([closed, closed])
    assert row.status == "fail"
    assert row.found == (
        f"can be kept nowhere: {closed} cannot be written (Not a directory); {closed} cannot be "
        "written (Not a directory). numba then refuses to load the planner"
    )
    assert row.do == "set NUMBA_CACHE_DIR to a folder that can be written"
