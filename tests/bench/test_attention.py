"""`dynapar bench attention`: what it measures adds up, and what it cannot run it says."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dynapar.attention.bands import causal, full, spans, window
from dynapar.bench import attention_peers
from dynapar.bench.attention import AttentionCase, measure
from dynapar.bench.attention_command import attention_command
from dynapar.bench.attention_peers import (
    OneSequence,
    Peer,
    PeerRefusedError,
    contiguous_rows,
    head_tail_rows,
    prepare,
)
from dynapar.bench.one_device import Packed, cpu_op, dense, sdpa, seen
from dynapar.cli import main
from dynapar.errors import ConfigError
from tests.attention.oracle import dense_mask

SMALL = AttentionCase(lengths=(70, 1, 20), degree=2, heads=(4, 2, 8), turns=2)


def packed(lengths: tuple[int, ...], *, windows: bool = False) -> Packed:
    rng = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(sum(lengths), heads, 8, generator=rng) for heads in (4, 2, 2, 4))
    bands = [window(n, width=5) if windows else causal(n) for n in lengths]
    return Packed(q, k, v, grad, lengths, bands)


@pytest.mark.parametrize(("scheme", "sent"), [("staged", 1.0), ("ulysses", None)])
def test_two_ranks_share_the_work_and_send_what_is_needed(scheme: str, sent: float | None) -> None:
    (ours,) = measure(dataclasses.replace(SMALL, scheme=scheme))
    assert (ours.what, ours.degree, ours.refused) == ("dynapar", 2, None)
    assert ours.work is not None
    assert 1 <= ours.work < 1.1
    assert ours.sent == sent or (sent is None and ours.sent is not None and ours.sent > 1)
    assert ours.ring_sends is not None
    assert ours.ring_sends > 1
    for figure in (
        ours.seconds,
        ours.throughput,
        ours.of_op,
        ours.of_degree_1,
        ours.of_crowded_degree_1,
    ):
        assert figure is not None
        assert figure > 0


def test_one_rank_sends_nothing_and_peers_need_a_ring() -> None:
    (ours,) = measure(dataclasses.replace(SMALL, degree=1, mask="window:9", peers=("none",)))
    assert (ours.work, ours.sent, ours.of_op) == (1.0, 1.0, None)


def test_peers_that_cannot_run_are_named() -> None:
    results = measure(dataclasses.replace(SMALL, peers=tuple(attention_peers.PEERS)))
    assert [(r.what, r.refused) for r in results[1:]] == [
        (peer, "it is compared on one causal sequence") for peer in attention_peers.PEERS
    ]


def test_torchs_context_parallel_says_why_it_does_not_run_on_a_cpu() -> None:
    case = dataclasses.replace(SMALL, lengths=(64,), peers=("torch context_parallel",), turns=1)
    _, theirs = measure(case)
    assert theirs.refused is not None
    assert "does not have a sharding strategy registered" in theirs.refused


def test_a_peer_must_be_installed_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    given = OneSequence.of(packed((16,)))
    right = functional.scaled_dot_product_attention(
        given.q, given.k, given.v, is_causal=True, enable_gqa=True
    )

    def run(out: Tensor) -> Peer:
        return Peer(lambda given, rank, degree: lambda: out, contiguous_rows)

    monkeypatch.setattr(
        attention_peers,
        "PEERS",
        {
            "right": run(right[:, :, 8:]),
            "wrong": run(right[:, :, :8]),
            "missing": Peer(
                lambda *_: attention_peers._imported("no_such_ring").ring,
                contiguous_rows,
            ),
        },
    )
    assert prepare("right", given, 1, 2)().shape == (1, 4, 8, 8)
    with pytest.raises(PeerRefusedError, match=r"its output is [\d.]+ apart from attention"):
        prepare("wrong", given, 1, 2)
    with pytest.raises(PeerRefusedError, match=r"not installed \(No module named 'no_such_ring'\)"):
        prepare("missing", given, 1, 2)
    with pytest.raises(PeerRefusedError, match="a length divisible by 6, not 16"):
        prepare("right", given, 1, 3)


def test_shards_of_peers_hold_each_row_once() -> None:
    for rows in (contiguous_rows, head_tail_rows):
        assert sorted(torch.cat([rows(24, r, 3) for r in range(3)]).tolist()) == list(range(24))
    assert head_tail_rows(8, 1, 2).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("windows", [False, True])
def test_one_device_computes_the_same_attention(
    windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = packed((9, 1, 6), windows=windows)
    mask = dense_mask(given.lengths, given.bands)
    want = dense(given.q, given.k, given.v, visible=mask)
    outs: list[Tensor] = []
    monkeypatch.setattr(torch.autograd, "grad", lambda out, *rest: outs.append(out))
    sdpa(given)()
    torch.testing.assert_close(outs[0], want)
    op = cpu_op(given)
    assert (op is None) == windows
    if op:
        op()


def test_seen_pairs_are_those_of_the_mask() -> None:
    mask = spans(20, [(3, 7), (12, 20)], width=4, beyond_width=True)
    assert torch.equal(seen(20, mask), dense_mask([20], [mask]))
    assert seen(5, full(5)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": "window"}, "the mask is 'window'; expected causal, full, window:N"),
        ({"mask": "causal:3"}, "the mask is 'causal:3'"),
        ({"dtype": "int8"}, "the dtype is 'int8'; expected one of"),
    ],
)
def test_a_case_that_cannot_be_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(dataclasses.replace(SMALL, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"heads": "8,3,64"}, "heads are '8,3,64'; expected query heads, key/value heads"),
        ({"lengths": "5,x"}, "lengths are 'x'; expected whole numbers above 0"),
        ({"degrees": "0"}, "degrees are '0'; expected whole numbers above 0"),
    ],
)
def test_options_that_cannot_be_read_are_refused(option: dict[str, str], message: str) -> None:
    given = {"lengths": "5", "degrees": "1", "heads": "2,1,8"} | option
    with pytest.raises(ConfigError, match=message):
        attention_command(
            **given, mask="causal", dtype="float32", scheme="auto", turns=1, peers=False, json=True
        )


def test_the_command_prints_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "bench",
        "attention",
        "--lengths",
        "9*3,4,2~30",
        "--degrees",
        "1",
        "--heads",
        "2,1,8",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*options, "--turns", "1", "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"] == [9, 9, 9, 4, 33, 26]
    assert found["tokens"] == 90
    (result,) = found["results"]
    assert math.isfinite(result["throughput"])
    with pytest.raises(SystemExit):
        main([*options, "--turns", "1"])
    assert "causal attention of 9*3,4,2~30, 90 tokens" in capsys.readouterr().out
