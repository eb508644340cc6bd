"""CCQ's kernels in Triton's interpreter, at small sizes; tests/gpu runs them, with every entry of the table, on a card."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fastweights.notation import CCQState
from fastweights.ops.ccq.forward_triton import Shape, Tiles, one_shape
from fastweights.ops.ccq.query import ccq_query, ccq_step_
from fastweights.ops.ccq.query_triton import _flat, ccq_forward, ccq_query_triton
from tests.ops.ccq_loop import cast, differentiate, draw, loop
from tests.ops.grid import bounds, compare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")

ONE = one_shape(Shape(16, 1, 1), 32)
"""Segments of two blocks."""
TWO = Tiles(Shape(32, 1, 1), Shape(16, 1, 1), Shape(16, 1, 1), Shape(32, 1, 1), 32)
"""Blocks made of two chunks of the sums."""
THREE = one_shape(Shape(16, 1, 1), 64)
"""A block with several before it, and several after."""


def check(x, tiles):
    """As good as the loop in float32; a half-precision operand is rounded there too, once."""
    form = partial(ccq_query_triton, tiles=tiles)
    compare(differentiate(form, x), differentiate(loop, cast(x, torch.float32)), differentiate(loop, cast(x, torch.float64)))


@pytest.mark.parametrize("tiles", [ONE, TWO, THREE], ids=["one", "two", "three"])
@pytest.mark.parametrize(
    "T, K, state", [(40, 20, True), (17, 16, False), (1, 16, True), pytest.param(150, 33, False, marks=pytest.mark.full)]
)
def test_it_is_the_loop(T, K, state, tiles):
    check(draw(T=T, B=1, H=2, K=K, dtype=torch.float32, state=state), tiles)


def test_half_precision_is_the_loop():
    check(draw(T=40, B=2, H=1, K=16, dtype=torch.float16, state=True), ONE)


def test_keys_are_scaled_on_the_way_in():
    x = draw(T=40, B=1, H=2, K=16, dtype=torch.float32)
    scale = torch.rand(1, 40, 2) + 0.5
    upstream = torch.randn(1, 40, 2, 16)

    def run(form):
        k, s = x["k"].clone().requires_grad_(), scale.clone().requires_grad_()
        q, _ = form(k, s)
        return (q, *torch.autograd.grad(q, (k, s), upstream.to(q.dtype)))

    got = run(lambda k, s: ccq_query_triton(x["q"], k, x["lam"], key_scale=s, tiles=ONE))
    plain = run(lambda k, s: loop(x["q"], k * s.unsqueeze(-1), x["lam"]))
    exact = run(lambda k, s: loop(x["q"].double(), k.double() * s.double().unsqueeze(-1), x["lam"].double()))
    names = ("q'", "grad k", "grad key_scale")
    compare(*(dict(zip(names, r, strict=True)) for r in (got, plain, exact)))


LENGTHS = [0, 1, 5, 0, 40, 0]


def test_packed_documents_are_the_loops():
    x = draw(T=46, B=1, H=1, K=16, dtype=torch.float32, state=True, rows=6) | {"cu_seqlens": bounds(LENGTHS)}
    check(x, ONE)


def test_documents_do_not_touch():
    x = draw(T=46, B=1, H=1, K=16, dtype=torch.float32) | {"cu_seqlens": bounds(LENGTHS)}
    other = {**x, "k": x["k"].clone()}
    other["k"][:, 1:6] = 3.0
    before, after = (differentiate(partial(ccq_query_triton, tiles=ONE), y) for y in (x, other))
    for name in ("q'", "grad q", "grad k", "grad lam"):
        assert torch.equal(before[name][:, 6:], after[name][:, 6:]), name
    assert not torch.equal(before["q'"][:, :6], after["q'"][:, :6])


def test_no_tokens_leave_the_state_alone():
    x = draw(T=0, B=2, H=1, K=16, dtype=torch.float32, state=True)
    _, state = ccq_query_triton(**x)
    assert all(torch.equal(new, old) and new.data_ptr() != old.data_ptr() for new, old in zip(state, x["state"], strict=True))


def test_constant_keys_have_no_spread_at_all():
    k = torch.randn(1, 1, 1, 16).expand(1, 64, 1, 16)
    q = torch.randn(1, 64, 1, 16)
    clean, state = ccq_query_triton(q, k, torch.ones(1, 64, 1), tiles=ONE)
    torch.testing.assert_close(clean, q, rtol=1e-6, atol=1e-6)
    assert state.covariance.abs().max() <= 1e-11 * k.square().sum()


def test_crowded_keys_keep_their_digits():
    """Spread 1e-4 around 1: C is right to 1e-3."""
    k = 1 + 1e-4 * torch.randn(1, 96, 1, 16)
    _, state = ccq_query_triton(torch.randn(1, 96, 1, 16), k, torch.ones(1, 96, 1), tiles=ONE)
    exact = torch.cov(k[0, :, 0].double().mT, correction=0) * 96
    assert (state.covariance[0, 0] - exact).norm() <= 1e-3 * exact.norm()


def test_fake_shapes_are_the_real_ones():
    x = draw(T=46, B=1, H=1, K=20, dtype=torch.float16, state=True, rows=6)
    args = (x["q"], x["k"], x["lam"].float(), None, *x["state"], bounds(LENGTHS), _flat(TWO))
    leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    torch.library.opcheck(ccq_forward, leaves, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.compile
def test_compiles_into_one_graph():
    x = draw(T=20, B=1, H=1, K=16, dtype=torch.float32, state=True)
    form = partial(ccq_query_triton, tiles=ONE)
    eager, graph = differentiate(form, x), differentiate(torch.compile(form, fullgraph=True, backend="aot_eager"), x)
    assert all(torch.equal(eager[name], graph[name]) for name in eager)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("T, K", [(1, 16), (3, 20), (1, 100)])
def test_step_is_the_loop_in_place(T, K, forget):
    x = draw(T=T, B=2, H=2, K=K, dtype=torch.float32, state=True, forget=forget)
    exact, plain = loop(**cast(x, torch.float64)), loop(**x)
    state = CCQState(*(t.clone() for t in x["state"]))
    state.covariance.copy_((state.covariance + state.covariance.mT) / 2)
    clean = ccq_step_(x["q"], x["k"], x["lam"], state, log_decay=x.get("log_decay"), backend="triton")
    named = [dict(zip(("q'", *CCQState._fields), (q, *s), strict=True)) for q, s in ((clean, state), plain, exact)]
    compare(*named)


def test_dispatch_reaches_the_kernels():
    x = draw(T=20, B=1, H=1, K=16, dtype=torch.float32)
    assert torch.equal(ccq_query(**x, backend="triton")[0], ccq_query_triton(**x)[0])
    forgetting = draw(T=20, B=1, H=1, K=16, dtype=torch.float32, forget=True)  # not fused: through the decay kernels
    exact = loop(**cast(forgetting, torch.float64))[0]
    assert (ccq_query(**forgetting, backend="triton")[0] - exact).norm() <= 1e-5 * exact.norm()
