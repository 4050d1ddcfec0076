from __future__ import annotations

from dynapar.doctor.place import Place, check_place, find_place

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_a_launchers_word_counts() -> None:
    place = find_place(TORCHRUN, gpus=8, ranks=2)
    assert place == Place(ranks=16, local_ranks=8, gpus=8, launched=True)
    assert place.several_machines
    rows = check_place(place, TORCHRUN, cores=64)
    assert [row.found for row in rows] == [
        "16, 8 of them on this machine",
        "64 for 8 ranks",
    ]


def test_without_a_launcher_there_is_one_rank_a_gpu() -> None:
    assert find_place({}, gpus=4) == Place(ranks=4, local_ranks=4, gpus=4, launched=False)
    assert find_place({}, gpus=0) == Place(ranks=1, local_ranks=1, gpus=0, launched=False)
    place = find_place({"WORLD_SIZE": "two", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}, gpus=0, ranks=6)
    assert place == Place(ranks=6, local_ranks=6, gpus=0, launched=False)
    assert not place.several_machines
    rows = check_place(find_place({}, gpus=0), {}, cores=1)
    assert [row.found for row in rows] == [
        "not started by a launcher; looking for 1 rank on this machine (--ranks)",
        "1 for 1 rank",
    ]


def test_tasks_without_torchrun_would_each_train_alone() -> None:
    row, _ = check_place(find_place({}, gpus=0), {"SLURM_NTASKS": "8"}, cores=8)
    assert row.status == "warn"
    assert row.found == (
        "SLURM_NTASKS is 8, but RANK and WORLD_SIZE are not set: each process would train alone"
    )
    row, _ = check_place(find_place({}, gpus=0), {"SLURM_NTASKS": "1"}, cores=8)
    assert row.status == "ok"
    both = TORCHRUN | {"SLURM_NTASKS": "8"}
    assert {row.status for row in check_place(find_place(both, gpus=8), both, cores=8)} == {"ok"}


def test_ranks_that_share_cores_are_named() -> None:
    _, row = check_place(find_place({}, gpus=0, ranks=8), {}, cores=4)
    assert (row.status, row.found) == ("warn", "4 for 8 ranks")
