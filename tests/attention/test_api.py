"""The operator on one rank: gradients, checkpointing, compilation, the plan's life, messages."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dynapar.attention import staged
from dynapar.attention.api import attend
from dynapar.attention.bands import causal, full
from dynapar.attention.calls import AttentionError
from dynapar.attention.exchange import Transport
from dynapar.attention.kernels import KernelError
from dynapar.attention.plan import BoundPlan, live_plan, live_plans, plan_attention
from tests.attention.oracle import dense_attention, dense_mask

LENGTHS = (40, 1, 23)
BANDS = (causal(40), causal(1), full(23))
F64 = torch.float64


def bound(kernel: str = "auto") -> BoundPlan:
    plan = plan_attention(LENGTHS, degree=1, bands=BANDS)
    return plan.bind(ranks=[0], transport=Transport(), kernel=kernel)


def tensors(dtype: torch.dtype = F64, tokens: int = sum(LENGTHS)) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(s, generator=rng, dtype=F64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_equals_dense_attention(softcap: float | None, with_sinks: bool) -> None:
    q, k, v = tensors()
    used = [q, k, v]
    sinks = None
    if with_sinks:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=F64, requires_grad=True)
        used.append(sinks)
    mask = dense_mask(LENGTHS, BANDS)
    out = attend(q, k, v, bound(), scale=0.7, softcap=softcap, sinks=sinks)
    want = dense_attention(q, k, v, mask=mask, scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    down = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    got = torch.autograd.grad(out, used, down)
    for a, b in zip(got, torch.autograd.grad(want, used, down), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_tokens_that_see_nothing_give_0() -> None:
    """A band that leaves query 0 without a key; its gradients are 0, not nan."""
    plan = plan_attention([4], degree=1, bands=[(causal(4)[0]._replace(lo=1),)])
    q, k, v = tensors(tokens=4)
    out = attend(q, k, v, plan.bind(ranks=[0], transport=Transport()))
    assert (out[0] == 0).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_dtype_out_is_dtype_in(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    out = attend(q, k, v, bound())
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert {x.dtype for x in (out, *gradients)} == {dtype}


def test_an_empty_shard_goes_forward_and_backward() -> None:
    plan = plan_attention([], degree=1, bands=[]).bind(ranks=[0], transport=Transport())
    q, k, v = tensors(tokens=0)
    out = attend(q, k, v, plan)
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_operators_are_well_formed() -> None:
    """Schema, fake kernels and autograd registration, as torch itself checks them."""
    plan = bound()
    q, k, v = tensors()
    for sinks in (None, torch.zeros(4, dtype=F64, requires_grad=True)):
        args = (q, k, v, sinks, plan.handle, 0.5, None)
        torch.library.opcheck(torch.ops.dynapar.attend.default, args)
        with torch.no_grad():
            out, lse = torch.ops.dynapar.attend(*args)
            inputs = [None if x is None else x.detach() for x in (q, k, v, sinks)]
            torch.library.opcheck(
                torch.ops.dynapar.attend_backward.default,
                (out, *inputs, out, lse, plan.handle, 0.5, None),
            )


def test_compiles_into_one_graph_that_serves_other_plans() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        compiled: Callable[..., object] = aot_eager(graph, examples)
        return compiled

    def layer(q: Tensor, k: Tensor, v: Tensor, plan: BoundPlan) -> Tensor:
        return attend(q * 2, k, v, plan).sin()

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for length in (10, 11, 12, 13):
        plan = plan_attention([length], degree=1, bands=[causal(length)])
        one = plan.bind(ranks=[0], transport=Transport())
        q, k, v = tensors(tokens=length)
        want = torch.autograd.grad(layer(q, k, v, one).sum(), (q, k, v))
        got = torch.autograd.grad(compiled(q, k, v, one).sum(), (q, k, v))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # One for the first shapes and handle, one in which both may change.
    assert len(graphs) == 2


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each forward of attention."""
    calls: list[int] = []
    real = staged.forward

    def counted(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, setting: staged.Setting
    ) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return real(q, k, v, sinks, setting)

    monkeypatch.setattr(staged, "forward", counted)
    return calls


def layer_of(plan: BoundPlan) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(q * 1.5, k * 1.0, v * 1.0, plan).sin()


def test_checkpointing_gives_the_same_bits(forwards: list[int]) -> None:
    q, k, v = tensors(torch.float32)
    layer = layer_of(bound())
    direct = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    assert len(forwards) == 1
    out = checkpoint(layer, q, k, v, use_reentrant=False)
    again = torch.autograd.grad(out.sum(), (q, k, v))
    assert len(forwards) == 3
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))


def test_selective_checkpointing_saves_the_second_forward(forwards: list[int]) -> None:
    q, k, v = tensors(torch.float32)
    layer = layer_of(bound())
    direct = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    forwards.clear()

    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if op == torch.ops.dynapar.attend.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    out = checkpoint(
        layer,
        q,
        k,
        v,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    again = torch.autograd.grad(out.sum(), (q, k, v))
    assert len(forwards) == 1
    assert all(torch.equal(a, b) for a, b in zip(direct, again, strict=True))


def test_the_graph_keeps_the_plan_alive() -> None:
    q, k, v = tensors()
    out = attend(q, k, v, bound())
    gc.collect()
    out.sum().backward()
    assert q.grad is not None


def test_thousands_of_plans_leave_nothing_behind() -> None:
    gc.collect()
    before = live_plans()
    plan = plan_attention([2], degree=1, bands=[causal(2)])
    q, k, v = tensors(torch.float32, tokens=2)
    for _ in range(3000):
        attend(q, k, v, plan.bind(ranks=[0], transport=Transport())).sum().backward()
    gc.collect()
    assert live_plans() == before


def test_a_plan_that_is_gone_is_named() -> None:
    handle = bound().handle
    gc.collect()
    with pytest.raises(AttentionError, match=f"attention plan {handle} is gone; expected it to"):
        live_plan(handle)


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = tensors()
    (grad,) = torch.autograd.grad(attend(q, k, v, bound()).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_softcap_on_a_kernel_without_it_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(KernelError, match=r"'cpu_flash' cannot run .* it has no softcap"):
        attend(q, k, v, bound("cpu_flash"), softcap=30.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[None], k, v), r"q \[1, 64, 4, 8\].*expected \[tokens, heads, head"),
        (lambda q, k, v: (q, k, v[:, :1]), r"expected \[tokens, heads, head_dim\] with equal k"),
        (lambda q, k, v: (q[1:], k[1:], v[1:]), "expected 64 tokens, this rank's shard at posit"),
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads and 2 key/value heads; expected a mul"),
        (lambda q, k, v: (q, k.float(), v), "torch.float64, torch.float32, torch.float64 on cpu"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], message: str
) -> None:
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(ValueError, match=message):
        attend(*change(q, k, v), bound())


def test_odd_arguments_are_named() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"softcap is 0\.0; expected above 0: use None"):
        attend(q, k, v, bound(), softcap=0.0)
    with pytest.raises(ValueError, match=r"sinks have shape \[2\] on cpu; expected \[4\]"):
        attend(q, k, v, bound(), sinks=torch.zeros(2))


def test_binding_to_other_ranks_is_refused() -> None:
    plan = plan_attention([5], degree=2, bands=[causal(5)])
    with pytest.raises(ValueError, match=r"ranks \[0\] were bound to a plan of degree 2; expec"):
        plan.bind(ranks=[0], transport=Transport())
    with pytest.raises(ValueError, match=r"rank 0 binds a plan of ranks \[2, 1\]; expected to be"):
        plan.bind(ranks=[2, 1], transport=Transport())


def test_masks_that_do_not_fit_are_named_with_their_sequence() -> None:
    with pytest.raises(ValueError, match="bands has 1 masks for 2 sequences; expected one for"):
        plan_attention([5, 6], degree=1, bands=[causal(5)])
    with pytest.raises(ValueError, match=r"bands\[1\]: .* leaves a sequence of 6 tokens"):
        plan_attention([5, 6], degree=1, bands=[causal(5), causal(7)])
