from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynapar.simulate.peers import PeerError, PeerMissingError
from dynapar.simulate.peers.judge import ask
from dynapar.simulate.peers.process import PeerProcess, PeerTimeoutError
from dynapar.simulate.peers.request import Request
from tests.samples import table
from tests.simulate.peers import fake
from tests.simulate.peers.scenes import problem_of

HERE = "tests.simulate.peers"


def request(kind: int) -> Request:
    return ask(problem_of(table([100, 200, 300]), "1x2"), kind)


@pytest.fixture(scope="module")
def process() -> Iterator[PeerProcess]:
    process = PeerProcess(f"{HERE}.fake", limit=0.2)
    yield process
    process.close()


def test_plans_come_back_with_their_time(process: PeerProcess) -> None:
    plan, seconds = process.ask(request(fake.GOOD))
    assert [piece.rows for piece in plan] == [(0,), (1,), (2,)]
    assert 0.0 < seconds < 0.2


def test_what_a_peer_prints_is_no_reply(process: PeerProcess) -> None:
    assert len(process.ask(request(fake.CHATTERS))[0]) == 3


def test_a_plan_that_takes_too_long_is_stopped_and_the_next_one_starts_anew(
    process: PeerProcess,
) -> None:
    with pytest.raises(PeerTimeoutError, match=r"^timeout: no plan within 0.2 s of CPU time$"):
        process.ask(request(fake.ENDLESS))
    assert len(process.ask(request(fake.GOOD))[0]) == 3


def test_one_that_waits_for_ever_is_stopped_by_the_clock(process: PeerProcess) -> None:
    with pytest.raises(PeerTimeoutError, match=r"^timeout: no plan within 2 s by the clock$"):
        process.ask(request(fake.WAITS))
    assert len(process.ask(request(fake.GOOD))[0]) == 3


def test_an_error_of_the_peers_is_the_reason(process: PeerProcess) -> None:
    with pytest.raises(PeerError, match=r"^it ended with KeyError: 'group of 3'$"):
        process.ask(request(fake.CRASHES))
    with pytest.raises(PeerError, match=r"^no plan for 3 samples$"):
        process.ask(request(fake.REFUSES))
    assert len(process.ask(request(fake.GOOD))[0]) == 3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("absent", r"^absent is not installed; pip install absent==1$"),
        (
            "broken",
            r"^it ended with ModuleNotFoundError: No module named 'no_such_module'; install",
        ),
    ],
)
def test_what_is_missing_is_named(module: str, message: str) -> None:
    process = PeerProcess(f"{HERE}.{module}")
    for _ in range(2):
        with pytest.raises(PeerMissingError, match=message):
            process.wait()
    process.close()
