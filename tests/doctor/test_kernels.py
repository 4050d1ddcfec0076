from __future__ import annotations

from dynapar.attention.kernels import KERNELS
from dynapar.doctor.kernels import check_kernels, refusals

NO_FLASH = "flash-attn cannot be imported (No module named 'flash_attn')"


def test_the_reasons_are_the_kernels_own() -> None:
    reasons = refusals("cpu")
    assert list(reasons) == list(KERNELS)
    assert reasons["cpu_flash"] is None
    assert reasons["flash_attn_2"] == "it runs on CUDA, not on cpu"
    chosen, *rows = check_kernels(reasons, device="cpu")
    assert (chosen.status, chosen.found) == ("ok", "cpu_flash on cpu")
    assert [row.check for row in rows] == [f"kernel {name}" for name in KERNELS]
    found = {row.check: row.found for row in rows}
    assert found["kernel cpu_flash"] == "runs bfloat16 on cpu"
    assert found["kernel flash_attn_2"] == ("not for bfloat16 on cpu: it runs on CUDA, not on cpu")


def test_plain_products_alone_are_a_warning() -> None:
    reasons = {"flash_attn_2": NO_FLASH, "cuda_flash": "this build has none", "math": None}
    chosen, flash, *_ = check_kernels(reasons, device="cuda")
    assert chosen.status == "warn"
    assert chosen.found.startswith("only plain matrix products run on cuda: several times slower")
    assert flash.found == f"not for bfloat16 on cuda: {NO_FLASH}"


def test_torchs_own_flash_is_good_enough() -> None:
    reasons = {"flash_attn_2": NO_FLASH, "cuda_flash": None, "math": None}
    assert check_kernels(reasons, device="cuda")[0].found == "cuda_flash on cuda"


def test_no_kernel_is_a_failure() -> None:
    chosen, *_ = check_kernels({"math": "it has no torch.int8"}, device="cuda")
    assert chosen.status == "fail"
    assert chosen.found == "no kernel runs on cuda: math: it has no torch.int8"
