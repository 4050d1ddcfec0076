"""One index map cuts every tensor that has an entry for each token, and puts it together again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.bands import causal
from dynapar.attention.plan import AttentionPlan, plan_attention
from dynapar.attention.tokens import shard, unshard
from tests.attention.test_tiles import plans

LENGTHS = (8, 3, 1)


def made(degree: int = 3) -> AttentionPlan:
    return plan_attention(LENGTHS, degree=degree, bands=[causal(n) for n in LENGTHS])


@given(plans(), st.sampled_from([(), (4, 1), (3, 1), (2, 5)]), st.integers(0, 1))
def test_unshard_undoes_shard_for_any_leading_dims(
    planned: tuple[AttentionPlan, object], leading: tuple[int, ...], trailing: int
) -> None:
    plan, _ = planned
    tokens = sum(plan.lengths)
    x = torch.randn(*leading, tokens, *[3] * trailing)
    parts = [shard(x, plan, p, dim=-1 - trailing) for p in range(plan.degree)]
    assert [part.shape[-1 - trailing] for part in parts] == list(plan.tokens)
    assert torch.equal(unshard(parts, plan, dim=-1 - trailing), x)


def test_mrope_rows_are_cut_on_the_token_axis() -> None:
    """Three rows of position ids in the form that models take: (3, 1, tokens)."""
    positions = torch.arange(12) + 100 * torch.arange(3)[:, None, None]
    part = shard(positions, made(), 0)
    assert part.tolist() == [[[0, 6, 7, 10, 11]], [[100, 106, 107, 110, 111]],
                             [[200, 206, 207, 210, 211]]]  # fmt: skip


def test_gradients_go_back_through_both() -> None:
    x = torch.randn(2, 12, requires_grad=True)
    plan = made()
    weights = torch.arange(24.0).reshape(2, 12)
    (unshard([shard(x, plan, p) for p in range(3)], plan) * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


def test_a_wrong_dim_is_named() -> None:
    with pytest.raises(ValueError, match=r"shape \[12, 4\] has 4 entries in dim -1; expected 12, "):
        shard(torch.zeros(12, 4), made(), 0)
    with pytest.raises(ValueError, match="expected 5, the tokens of position 0: name the dim"):
        unshard([torch.zeros(n) for n in (4, 4, 4)], made())


def test_missing_shards_are_named() -> None:
    with pytest.raises(ValueError, match="2 shards were given of a microbatch of degree 3; expec"):
        unshard([torch.zeros(4)] * 2, made())
