from __future__ import annotations

import pytest

from tests.records.cases import CASES, FOLDER, record


@pytest.mark.parametrize("name", CASES)
def test_plan_is_the_recorded_one(name: str) -> None:
    """A refactor must not move a sample. To accept a change: scripts/record_plans."""
    assert record(name) == (FOLDER / f"{name}.json").read_text()


def test_every_record_has_a_case() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(CASES)
