from __future__ import annotations

import pytest

from dynapar.data.stubs import StubCount
from dynapar.errors import CheckpointError, SampleError


def test_the_share_counts_from_twenty_samples_on() -> None:
    count = StubCount().add(drawn=8, stubs=1)
    count.check(limit=0.05, last="'a'")
    with pytest.raises(SampleError) as caught:
        count.add(drawn=8, stubs=1).check(limit=0.05, last="'a': it is gone.")
    assert str(caught.value) == (
        "2 of 16 samples of this run could not be loaded; expected at most 5% (of 20 or more). "
        "The last is 'a': it is gone. Repair the source and index it again, or raise "
        "batch.stub_limit"
    )


def test_a_state_is_read_back_and_an_old_one_lacks_it() -> None:
    count = StubCount(drawn=40, stubs=2)
    assert StubCount.from_state({"cursor": 3, **count.state_dict()}) == count
    assert StubCount.from_state({"cursor": 3}) == StubCount()


@pytest.mark.parametrize("drawn", ["many", -1, 1])
def test_a_state_of_no_counts_is_refused(drawn: object) -> None:
    with pytest.raises(CheckpointError, match=r"drawn_samples .* expected two counts"):
        StubCount.from_state({"drawn_samples": drawn, "stub_samples": 2})
