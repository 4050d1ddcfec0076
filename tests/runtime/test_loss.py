"""The loss in chunks is the plain sum; where nothing is learnt it still takes part in backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from dynapar.data.samples import IGNORE
from dynapar.runtime.loss import token_loss_sum


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_sum_to_the_whole(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(8, 11, dtype=torch.float64)
    hidden = torch.randn(20, 8, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, 11, (20,), generator=generator)
    targets[[0, 5, 6, 19]] = IGNORE
    whole = functional.cross_entropy(head(hidden), targets, ignore_index=IGNORE, reduction="sum")
    chunked = token_loss_sum(hidden, targets, head=head, chunk=chunk)
    torch.testing.assert_close(chunked, whole, rtol=1e-14, atol=0)
    parameters = [hidden, *head.parameters()]
    for got, want in zip(
        torch.autograd.grad(chunked, parameters),
        torch.autograd.grad(whole, parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_without_targets_it_is_a_zero_that_reaches_head_and_hidden_states() -> None:
    head = nn.Linear(4, 5)
    hidden = torch.full((3, 4), torch.inf).requires_grad_()
    loss = token_loss_sum(hidden, torch.full((3,), IGNORE), head=head, chunk=2)
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_low_precision_logits_are_summed_in_float32() -> None:
    head = nn.Linear(4, 5, dtype=torch.bfloat16)
    hidden = torch.ones(3, 4, dtype=torch.bfloat16)
    assert (
        token_loss_sum(hidden, torch.tensor([1, 2, 0]), head=head, chunk=2).dtype == torch.float32
    )
    masked = torch.full((3,), IGNORE)
    assert token_loss_sum(hidden, masked, head=head, chunk=2).dtype == torch.float32
