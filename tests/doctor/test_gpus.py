from __future__ import annotations

from dynapar.doctor.finding import Finding
from dynapar.doctor.gpus import Gpu, check_gpus, find_gpus
from dynapar.doctor.place import Place

H100 = "NVIDIA H100 80GB HBM3"


def node(count: int, **changes: object) -> list[Gpu]:
    gpus = []
    for number in range(count):
        peers = tuple(other for other in range(count) if other != number)
        gpus.append(Gpu(H100, (9, 0), 80 << 30, peers)._replace(**changes))  # type: ignore[arg-type]
    return gpus


def look(gpus: list[Gpu], *, ranks: int, driver: bool = True, build: str = "CUDA 12.8") -> Finding:
    (row,) = [row for row in every(gpus, ranks, driver, build) if row.check == "GPUs"]
    return row


def every(
    gpus: list[Gpu],
    ranks: int,
    driver: bool = True,
    build: str = "CUDA 12.8",
    nccl: bool = True,
) -> list[Finding]:
    place = Place(ranks=ranks, local_ranks=ranks, gpus=len(gpus), launched=True)
    return check_gpus(gpus, place, driver=driver, build=build, nccl=nccl)


def test_a_good_node() -> None:
    assert [(row.status, row.found) for row in every(node(8), 8)] == [
        ("ok", f"8: {H100}, 80 GiB"),
        ("ok", "between all 8 GPUs"),
    ]
    assert len(every(node(1), 1)) == 1


def test_this_machine_can_be_asked() -> None:
    assert isinstance(find_gpus(), list)


def test_no_gpu() -> None:
    row = look([], ranks=4, driver=False, build="CPU")
    assert (row.status, row.found) == ("ok", "none; torch (CPU build) trains on the CPU over gloo")
    row = look([], ranks=4, build="CPU")
    assert row.status == "warn"
    assert row.found == (
        "torch (CPU build) sees none, but the NVIDIA driver is loaded: a run would train on the CPU"
    )


def test_a_build_without_nccl() -> None:
    _, row, _ = every(node(2), 2, nccl=False)
    assert (row.check, row.status) == ("NCCL", "fail")
    assert row.found == "this build of torch (CUDA 12.8) has none: ranks on GPUs cannot meet"
    assert "NCCL" not in [row.check for row in every(node(1), 1, nccl=False)]


def test_more_ranks_than_gpus() -> None:
    row = look(node(4), ranks=8)
    assert row.status == "fail"
    assert row.found == "4 for 8 ranks: each rank needs one of its own"


def test_gpus_of_two_kinds() -> None:
    row = look([*node(1), Gpu("NVIDIA A100", (8, 0), 40 << 30, (0,))], ranks=2)
    assert row.status == "warn"
    assert row.found.startswith(f"of several kinds: {H100}, 80 GiB; NVIDIA A100, 40 GiB; plans")


def test_old_gpus_have_no_flash_attention() -> None:
    _, row = every(node(1, name="Tesla V100", capability=(7, 0)), 1)
    assert (row.check, row.status) == ("flash attention", "warn")
    assert row.found == (
        "GPU 0 (Tesla V100) has compute capability 7.0; flash attention and bfloat16 want 8.0 or "
        "more"
    )


def test_pairs_that_do_not_reach_each_other_are_named() -> None:
    *_, row = every(node(4, peers=()), 4)
    assert (row.check, row.status) == ("peer access", "warn")
    assert row.found.startswith("6 pairs of GPUs do not reach each other directly (0-1, 0-2, 0-3, ")
    *_, row = every(node(5, peers=()), 5)
    assert "1-4, ...): " not in row.found
    assert "0-4, 1-2, 1-3, ...): " in row.found
