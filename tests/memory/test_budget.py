from __future__ import annotations

import pytest

from dynapar.errors import ConfigError
from dynapar.memory import parse_bytes, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80 G", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5KiB", 1536),
        ("141e9", 141 * 10**9),
        ("7", 7),
        ("2TB", 2 * 10**12),
    ],
)
def test_bytes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "80PB", "-1GB", "80 gigabytes", "nan", "1i", "8iB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"memory is .*; expected bytes with a unit, such as 80GB"
    ):
        parse_bytes(text)


def test_no_byte_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory is '0\.2'; expected 1 byte or more"):
        parse_bytes("0.2")


def test_bytes_are_shown_in_powers_of_1000() -> None:
    assert [shown(x) for x in (999, 80e9, 2.5e12)] == ["999 B", "80.0 GB", "2.5 TB"]
