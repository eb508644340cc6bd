"""The ``delta`` family's forms against the reference loop: the parity grid, and what a grid does not show."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.notation import Coefficients
from fastweights.ops.delta.chunk import CHUNK, _backward, _forward, _inverse, chunk_delta
from fastweights.ops.delta.recurrent import _step, delta_step_, recurrent_delta
from fastweights.ops.dispatch import delta
from fastweights.ops.reference import reference_delta
from tests.ops.grid import DELTA, Case, Problem, check, compare, make, run, sample

FORMS = [chunk_delta, recurrent_delta]
BOTH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
UNIT = {"scales": (None, None, None), "decay": None, "beta": None}


@pytest.mark.parametrize("case", sample(DELTA))
def test_chunk_is_the_reference(case):
    check(chunk_delta, reference_delta, make(case))


@pytest.mark.parametrize("case", sample(DELTA, quick=9))
def test_recurrent_is_the_reference(case):
    check(recurrent_delta, reference_delta, make(case), few=4)


@pytest.mark.parametrize("rows", ["two", "packed"])
def test_chunk_passes_gradcheck(rows):
    x = make(Case(T=39, K=3, V=2, heads=(1, 2), dtype=torch.float64, decay="mixed", rows=rows, scales=("Hk", "Hv", "Hk")))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, *x.coef, x.state)]
    assert torch.autograd.gradcheck(lambda *leaves: _forward(*leaves, x.cu_seqlens, 0.7, True)[:2], leaves, fast_mode=True)


def test_gradient_of_a_gate_that_shuts_keeps_its_digits():
    """At a decay of −50 the gradient is of order e^−50; a difference of sums of order 1 would be noise. Every entry counts here."""
    x = make(Case(T=100, K=16, V=16, decay="extreme"))
    got, exact = (run(form, problem)["grad log_decay"] for form, problem in ((chunk_delta, x), (reference_delta, x.to(torch.float64))))
    assert 0 < exact.abs().max() < 1e-18
    rounding = 64 * torch.finfo(torch.float32).eps  # of a sum of K·V or C products
    assert ((got - exact).abs() <= rounding * exact.abs().max()).all()


def in_pieces(form, cuts):
    """The form run piece by piece, the state handed on."""

    def split(q, k, v, coef, *, scale, state, cu_seqlens):
        outputs = []
        for a, b in pairwise([0, *cuts, q.shape[1]]):
            piece = Coefficients(*(None if c is None else c[:, a:b] for c in coef))
            o, state = form(q[:, a:b], k[:, a:b], v[:, a:b], piece, scale=scale, state=state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    return split


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-4, 1.0, 1e3])
def test_keys_of_any_size(form, dtype, size):
    """k̂ = k/√(‖k‖² + ε) as KLA makes it; the forward is right in every dtype. (Its gradient at ‖k‖ → 0 is of order 1/ε, beyond a half.)"""
    x = make(Case(T=70, K=32, V=16, dtype=dtype, scales=("Hk", "Hk", None)))
    k = (size * F.normalize(x.k.float(), dim=-1)).to(dtype)
    n = (k.float().square().sum(-1) + 1e-6).rsqrt()
    x = replace(x, k=k, coef=x.coef._replace(key_scale=n, value_scale=n))
    if dtype == torch.float16:
        got, plain, exact = (run_forward(f, p) for f, p in ((form, x), (reference_delta, x), (reference_delta, x.to(torch.float64))))
        compare(got, plain, exact)
    else:
        check(form, reference_delta, x)


def run_forward(form, x: Problem):
    o, state = form(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state, cu_seqlens=x.cu_seqlens)
    return {"o": o, "state": state}


@pytest.mark.parametrize(
    "T, backward", [*(pytest.param(16_384, backward, marks=pytest.mark.full) for backward in (False, True)), (1_000, True)]
)
def test_equal_keys_and_strong_writes(T, backward):
    """β up to 1.9 on one key (nearly one in the second row): the system's matrix has powers that explode, its inverse does not."""
    x = make(Case(T=T, K=16, V=16, heads=(1, 2), rows="two", decay=None, beta="over-relaxed", scales=(None, None, None)))
    spread = torch.tensor([0.0, 1e-3])[:, None, None, None]
    k = F.normalize(torch.ones_like(x.k) + spread * torch.randn_like(x.k), dim=-1)
    x = replace(x, k=k, coef=x.coef._replace(beta=1.9 * torch.rand_like(x.coef.beta).sqrt()))
    if backward:  # the loop's own backward is quadratic in T: in pieces it is not
        check(chunk_delta, in_pieces(reference_delta, range(500, T, 500)), x)
    else:
        compare(*(run_forward(f, p) for f, p in ((chunk_delta, x), (reference_delta, x), (reference_delta, x.to(torch.float64)))))


def test_inverse_is_the_inverse_where_powers_explode():
    L = torch.full((1, 64, 64), 1.9).tril(-1)
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + L.double())
    assert L[0].double().matrix_power(32).abs().max() > 1e20
    assert exact.abs().max() <= 1.9 + 1e-6
    substituted = torch.linalg.solve_triangular(L, torch.eye(64).expand_as(L), upper=False, unitriangular=True)
    compare({"inverse": _inverse(L)}, {"inverse": substituted}, {"inverse": exact})


@BOTH
def test_a_unit_key_written_fully_is_read_back(form):
    """β = 1, a = 1, ‖k‖ = 1: S_tᵀ k_t = v_t, whatever was there before."""
    x = make(Case(T=100, K=32, V=48, dtype=torch.float64, rows="two", **UNIT))
    o, _ = form(x.k, x.k, x.v, x.coef, state=x.state)
    assert (o - x.v).abs().max() <= 64 * torch.finfo(torch.float64).eps * x.state.abs().max()


@BOTH
def test_a_zero_key_leaves_the_memory_but_for_the_decay(form):
    x = make(Case(T=75, K=16, V=16, scales=(None, None, None)))
    zero = torch.zeros_like(x.k)
    _, state = form(x.q, zero, x.v, x.coef._replace(log_decay=None), state=x.state)
    assert torch.equal(state, x.state)
    _, state = form(x.q, zero, x.v, x.coef, state=x.state)
    decayed = x.coef.log_decay.double().sum(1).exp()[:, :, None, None] * x.state
    torch.testing.assert_close(state.double(), decayed, rtol=75 * torch.finfo(torch.float32).eps, atol=0)


@BOTH
@pytest.mark.parametrize("rows", ["two", "packed"])
def test_no_tokens_return_the_state(form, rows):
    x = make(Case(T=0, rows=rows))
    for state in (x.state, None):
        o, final = form(x.q, x.k, x.v, x.coef, state=state, cu_seqlens=x.cu_seqlens)
        assert o.shape == x.v.shape
        assert torch.equal(final, torch.zeros_like(x.state) if state is None else state)
        assert state is None or final.data_ptr() != state.data_ptr()


@BOTH
def test_operands_stay_as_they_are_and_results_repeat(form):
    x = make(Case(T=70, rows="packed", layout="strided"))
    before = [t.clone() for t in (x.q, x.k, x.v, *x.coef[:4], x.state)]
    first, second = run(form, x), run(form, x)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(a, b) for a, b in zip(before, (x.q, x.k, x.v, *x.coef[:4], x.state), strict=True))


def test_chunk_refuses_a_second_derivative():
    x = make(Case(T=20, K=16, V=16))
    v = x.v.clone().requires_grad_()
    (grad,) = torch.autograd.grad(chunk_delta(x.q, x.k, v, x.coef)[0].square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


@given(st.lists(st.integers(0, 200), max_size=6).map(sorted))
@settings(max_examples=15, deadline=None)
def test_any_partition_is_one_pass(cuts):
    x = make(Case(T=200, K=16, V=24, heads=(1, 2), rows="two", decay="mixed"))
    check(in_pieces(delta, cuts), reference_delta, x)


def test_pieces_of_one_two_three_and_around_a_chunk():
    x = make(Case(T=200, K=16, V=24, heads=(1, 2), rows="two"))
    check(in_pieces(delta, [1, 3, 6, 70, 70, 135, 135 + CHUNK]), reference_delta, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [0, 1, 5])
def test_step_overwrites_the_state(dtype, T):
    x = make(Case(T=T, dtype=dtype, heads=(2, 4), rows="two", scales=("Hk", "Hv", "Hk"), layout="strided"))
    o, final = recurrent_delta(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state)
    wide = torch.zeros(2, 4, x.q.shape[3] + 3, x.v.shape[3], dtype=x.state.dtype)
    state = wide[:, :, 3:]  # a view into a larger buffer, as a cache may hold it
    state.copy_(x.state)
    got = delta_step_(x.q, x.k, x.v, x.coef, state, scale=x.scale)
    few = 4 * torch.finfo(state.dtype).eps
    assert got.dtype == dtype
    assert (state - final).abs().max() <= few * final.abs().max()
    assert not T or (got - o).abs().max() <= (few + torch.finfo(dtype).eps) * o.abs().max()
    assert not wide[:, :, :3].any()


@pytest.mark.compile
@pytest.mark.parametrize("rows", ["two", "packed"])
def test_custom_ops_keep_their_promises(rows):
    """Schema (what is mutated, nothing aliased), fake shapes, autograd and compilation, by torch's own checks."""
    x = make(Case(T=70, K=16, V=16, heads=(1, 2), rows=rows))
    leaves = [None if t is None else t.requires_grad_() for t in (x.q, x.k, x.v, *x.coef, x.state)]
    torch.library.opcheck(_forward, (*leaves, x.cu_seqlens, 1.0, True))
    with torch.no_grad():
        torch.library.opcheck(_forward, (*leaves, x.cu_seqlens, 1.0, False))
        o, final, *kept = _forward(*leaves, x.cu_seqlens, 1.0, True)
        operands = (*leaves[:-1], x.cu_seqlens, *kept)
        torch.library.opcheck(_backward, (*operands, torch.randn_like(o), torch.randn_like(final), 1.0))
        torch.library.opcheck(_backward, (*operands, None, torch.randn_like(final), 1.0))


@pytest.mark.compile
def test_step_declares_what_it_mutates():
    x = make(Case(T=2, K=16, V=16))
    torch.library.opcheck(_step, (x.q, x.k, x.v, *x.coef, x.state, 1.0))


def test_long_and_many_headed(monkeypatch):
    """Spans shorter than the batch, and many of them."""
    monkeypatch.setattr(import_module("fastweights.ops.delta.chunk"), "SPAN", 3)
    for rows in ("two", "packed"):
        check(chunk_delta, reference_delta, make(Case(T=200, K=16, V=16, heads=(2, 4), rows=rows)))


def test_strange_gates_are_exact():
    """β = 0 writes nothing; a log decay of −∞ forgets all; both keep finite gradients."""
    x = make(Case(T=70, K=16, V=16, decay="mixed"))
    beta = x.coef.beta.masked_fill(torch.rand_like(x.coef.beta) < 0.3, 0.0)
    log_decay = x.coef.log_decay.masked_fill(torch.rand_like(beta) < 0.1, -torch.inf)
    for form in FORMS:
        check(partial(form), reference_delta, replace(x, coef=x.coef._replace(beta=beta, log_decay=log_decay)))
