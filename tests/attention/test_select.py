import pytest

from dynapar.attention.select import select, staged_bytes


def test_each_position_is_a_stage_by_default() -> None:
    assert select(4).stages == ((1,), (2,), (3,))
    assert select(4).name == "staged"


def test_stages_spread_the_rounds() -> None:
    assert select(4, stages=1).stages == ((1, 2, 3),)
    assert select(6, stages=2).stages == ((1, 2), (3, 4, 5))
    assert select(3, stages=9).stages == ((1,), (2,))


def test_degree_1_is_local() -> None:
    scheme = select(1)
    assert (scheme.name, scheme.stages) == ("local", ())


def test_what_does_not_exist_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"'ulysses' was asked for at degree 4: it does not exist; .*'staged'"
    ):
        select(4, name="ulysses")


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="'local' was asked for at degree 2: it does not fit"):
        select(2, name="local")


def test_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stages is 0; expected 1 or more: use None"):
        select(2, stages=0)


def test_bytes_count_keys_and_values() -> None:
    assert staged_bytes(100, kv_heads=2, head_dim=64, itemsize=2) == 51_200
