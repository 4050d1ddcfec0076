import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynapar.attention.merge import add_sinks_, added, folded, merge_

EMPTY, FAR = -math.inf, 1e4


def partial(logits: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over some keys for one row and one head: out [1, 1, H] and lse [1, 1]."""
    if len(logits) == 0:
        return torch.zeros(1, 1, values.shape[1], dtype=values.dtype), values.new_full(
            (1, 1), EMPTY
        )
    return (torch.softmax(logits, 0) @ values)[None, None], torch.logsumexp(logits, 0)[None, None]


@given(st.integers(0, 4), st.integers(0, 4), st.sampled_from([1.0, 50.0, FAR]), st.integers(0, 99))
def test_merge_is_softmax_over_both_sides(a: int, b: int, spread: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(a + b, generator=rng, dtype=torch.float64) * spread
    values = torch.randn(a + b, 3, generator=rng, dtype=torch.float64)
    out, lse = partial(logits[:a], values[:a])
    merge_(out, lse, *partial(logits[a:], values[a:]))
    want_out, want_lse = partial(logits, values)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_a_row_that_nobody_has_seen_stays_empty() -> None:
    out, lse = partial(torch.empty(0), torch.empty(0, 3))
    merge_(out, lse, *partial(torch.empty(0), torch.empty(0, 3)))
    assert out.tolist() == [[[0.0, 0.0, 0.0]]]
    assert lse.tolist() == [[EMPTY]]


def test_sums_stay_in_float32_for_bfloat16_parts() -> None:
    total = torch.zeros(2, 1, 3), torch.zeros(2, 1)
    part = torch.ones(1, 1, 3, dtype=torch.bfloat16), torch.zeros(1, 1)
    out, lse = folded(total, torch.tensor([1]), part, first=False, tokens=2, dtype=torch.float32)
    assert out.dtype == torch.float32
    assert out[:, 0, 0].tolist() == [0.0, 0.5]
    assert lse[1, 0].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("rows", [slice(0, 2), slice(1, 2), torch.tensor([1, 0])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_first_part_and_a_first_term_count_from_nothing(
    rows: slice | torch.Tensor, dtype: torch.dtype
) -> None:
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    value = torch.arange(1.0, 1 + count)[:, None, None].to(dtype)
    want = torch.zeros(2, 1, 1)
    want[rows] = value.float()
    part = value.clone(), value[..., 0].float()
    out, lse = folded(None, rows, part, first=True, tokens=2, dtype=torch.float32)
    total = added(None, rows, value, tokens=2, dtype=torch.float32)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(lse, torch.where(want[..., 0] == 0, -math.inf, want[..., 0]))


def test_a_sink_is_one_more_key_of_value_0() -> None:
    logits = torch.tensor([0.3, -1.0], dtype=torch.float64)
    values = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    out, lse = partial(logits, values)
    add_sinks_(out, lse, torch.tensor([0.7], dtype=torch.float64))
    more = torch.cat([logits, torch.tensor([0.7], dtype=torch.float64)])
    want = partial(more, torch.cat([values, torch.zeros(1, 1, dtype=torch.float64)]))
    torch.testing.assert_close((out, lse), want)
