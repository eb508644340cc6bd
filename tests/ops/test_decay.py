"""The ``decay`` family's forms against the reference loop: the parity grid, and what a grid does not show."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.notation import Coefficients
from fastweights.ops.decay.chunk import _forward, chunk_decay
from fastweights.ops.decay.recurrent import decay_step_, recurrent_decay
from fastweights.ops.reference import reference_decay
from tests.ops.grid import DECAY, Case, bounds, check, compare, make, run, sample

FORMS = [chunk_decay, recurrent_decay]
FORGETTING = [None, "mixed", "channel mixed"]


def one(**factors):
    return make(Case(beta=None, **factors))


@pytest.mark.parametrize("case", sample(DECAY))
def test_chunk_is_the_reference(case):
    check(chunk_decay, reference_decay, make(case))


@pytest.mark.parametrize("case", sample(DECAY, quick=6))
def test_recurrent_is_the_reference(case):
    check(recurrent_decay, reference_decay, make(case))


@pytest.mark.parametrize("decay", FORGETTING)
@pytest.mark.parametrize("rows", ["two", "packed"])
def test_chunk_passes_gradcheck(decay, rows):
    x = one(T=19, K=5, V=3, heads=(1, 2), dtype=torch.float64, decay=decay, rows=rows, scales=("Hk", "Hv", "Hk"))
    leaves = [None if t is None else t.requires_grad_() for t in (x.q, x.k, x.v, *x.coef[1:], x.state)]
    assert torch.autograd.gradcheck(partial(_forward, cu_seqlens=x.cu_seqlens, scale=0.7), leaves, fast_mode=True)


@pytest.mark.parametrize("decay", ["extreme", "channel extreme"])
def test_gradient_of_a_gate_that_shuts_keeps_its_digits(decay):
    """At a decay of −50 the gradient is of order e^−50; a difference of sums of order 1 would be noise. Every entry counts here."""
    x = one(T=100, K=16, V=16, decay=decay, upstream="dense")
    got, exact = run(chunk_decay, x)["grad log_decay"], run(reference_decay, x.to(torch.float64))["grad log_decay"]
    size = run(reference_decay, one_sided(x).to(torch.float64))["grad log_decay"]
    assert 0 < exact.abs().max() < 1e-18
    assert ((got - exact).abs() <= 1e-5 * size).all()


def one_sided(problem):
    """The same problem with positive numbers alone, so that no digits cancel in its gradients: they bound the terms of the other's."""
    cast = {name: getattr(problem, name).abs() for name in ("q", "k", "v", "state", "grad_o", "grad_state")}
    return type(problem)(**{**vars(problem), **cast})


@pytest.mark.parametrize("form", FORMS)
def test_equal_channels_are_one_gate_per_head(form):
    x = one(T=70, heads=(2, 2), dtype=torch.float64, decay="mixed")
    wide = x.coef.log_decay.unsqueeze(-1).expand(-1, -1, -1, x.k.shape[-1])
    o, S = form(x.q, x.k, x.v, x.coef, state=x.state)
    o_wide, S_wide = form(x.q, x.k, x.v, x.coef._replace(log_decay=wide), state=x.state)
    torch.testing.assert_close(o, o_wide, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(S, S_wide, rtol=1e-13, atol=1e-13)


def test_without_decay_it_is_causal_attention_without_softmax():
    x = one(T=150, dtype=torch.float64, decay=None, scales=(None, None, None), state=False)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    o, S = chunk_decay(x.q, x.k, x.v, Coefficients(), scale=x.scale)
    torch.testing.assert_close(o.transpose(1, 2), x.scale * (q @ k.mT).tril() @ v, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(S, k.mT @ v, rtol=1e-13, atol=1e-13)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 17, 64, 65]), min_size=1, max_size=5), st.sampled_from(FORGETTING), st.booleans())
def test_any_split_of_a_sequence_gives_the_same(pieces, decay, gradients):
    form = partial(recurrent_decay) if sum(pieces) < 40 else chunk_decay
    x = one(T=sum(pieces), K=16, V=16, dtype=torch.float64, decay=decay, upstream="dense" if gradients else "o only")

    def in_pieces(q, k, v, coef, *, scale, state, cu_seqlens):
        outputs, start = [], 0
        for n in pieces:
            piece = slice(start, start + n)
            cut = Coefficients(*(None if c is None else c[:, piece] for c in coef))
            o, state = form(q[:, piece], k[:, piece], v[:, piece], cut, scale=scale, state=state)
            outputs.append(o)
            start += n
        return torch.cat(outputs, dim=1), state

    same = x.to(torch.float32)
    compare(run(in_pieces, x), run(reference_decay, same), run(form, x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", FORGETTING)
def test_documents_do_not_touch(form, decay):
    """Packed documents are, to the bit, what they are apart from any change in their neighbours."""
    lengths = [5, 70, 0, 64, 1]
    x = one(T=sum(lengths), K=16, V=16, decay=decay, state=False)
    edges = bounds(lengths)
    o, S = form(x.q, x.k, x.v, x.coef, cu_seqlens=edges)
    other = x.k.clone()
    other[:, 5:75] *= -3
    o_, S_ = form(x.q, other, x.v, x.coef, cu_seqlens=edges)
    changed = torch.zeros(sum(lengths), dtype=torch.bool)
    changed[5:75] = True
    assert torch.equal(o[:, ~changed], o_[:, ~changed]) and not torch.equal(o[:, changed], o_[:, changed])
    assert torch.equal(S[[0, 2, 3, 4]], S_[[0, 2, 3, 4]]) and not torch.equal(S[1], S_[1])
    for document, (start, end) in enumerate(pairwise(edges)):
        piece = slice(start, end)
        coef = Coefficients(*(None if c is None else c[:, piece] for c in x.coef))
        alone, S_alone = form(x.q[:, piece], x.k[:, piece], x.v[:, piece], coef)
        torch.testing.assert_close(o[:, piece], alone, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(S[document], S_alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [0, 1, 3, 70])
def test_state_is_fresh_and_operands_are_left_alone(form, T):
    x = one(T=T, K=16, V=16, decay="mixed")
    before = [t.clone() for t in (x.q, x.k, x.v, x.state)]
    _, S = form(x.q, x.k, x.v, x.coef, state=x.state)
    assert S.untyped_storage().data_ptr() != x.state.untyped_storage().data_ptr()
    S.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (x.q, x.k, x.v, x.state), strict=True))


@pytest.mark.parametrize("decay", FORGETTING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_step_is_the_recurrence_in_place(decay, dtype):
    x = one(T=3, K=16, V=24, heads=(2, 4), rows="two", decay=decay, dtype=dtype, scales=("Hk", "Hv", "Hk"))
    o, S = recurrent_decay(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state)
    state = x.state.clone()
    o_step = decay_step_(x.q, x.k, x.v, x.coef, state, scale=x.scale)
    assert o_step.dtype == dtype
    torch.testing.assert_close(o_step, o, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(state, S, rtol=1e-6, atol=1e-6)


def test_ten_thousand_tokens_of_strong_and_absent_decay_stay_right():
    """Nothing accumulates from chunk to chunk: the tail of a long sequence is that of its last tokens after a −50."""
    x = one(T=10_000, K=16, V=16, heads=(1, 1), decay="channel mixed", state=False, upstream="o only")
    log_decay = x.coef.log_decay.clone()
    log_decay[:, -40] = -50
    o, S = chunk_decay(x.q, x.k, x.v, x.coef._replace(log_decay=log_decay))
    coef = Coefficients(*(None if c is None else c[:, -40:] for c in x.coef._replace(log_decay=log_decay)))
    tail, S_tail = reference_decay(x.q[:, -40:].double(), x.k[:, -40:].double(), x.v[:, -40:].double(), coef)
    torch.testing.assert_close(o[:, -40:].double(), tail, rtol=1e-5, atol=1e-5 * tail.abs().max().item())
    torch.testing.assert_close(S.double(), S_tail, rtol=1e-5, atol=1e-5 * S_tail.abs().max().item())


@pytest.mark.full
def test_seventy_thousand_documents():
    lengths = torch.ones(70_000, dtype=torch.int64)
    lengths[::7] = 0
    lengths[3::7] = 2
    x = one(T=int(lengths.sum()), K=4, V=4, heads=(1, 1), decay="model", state=False)
    o, S = chunk_decay(x.q, x.k, x.v, x.coef, cu_seqlens=bounds(lengths.tolist()))
    o_, S_ = recurrent_decay(x.q, x.k, x.v, x.coef, cu_seqlens=bounds(lengths.tolist()))
    torch.testing.assert_close(o, o_)
    torch.testing.assert_close(S, S_)


@pytest.mark.parametrize("decay", FORGETTING)
def test_custom_op_keeps_its_promises(decay):
    x = one(T=20, K=16, V=16, decay=decay, scales=("Hk", "Hv", "Hk"))
    leaves = [None if t is None else t.requires_grad_() for t in (x.q, x.k, x.v, *x.coef[1:], x.state)]
    torch.library.opcheck(_forward, (*leaves, None, 0.5))


@pytest.mark.compile
@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_graph_break(form):
    x = one(T=4, K=16, V=16, decay="channel mixed")
    check(torch.compile(form, fullgraph=True, backend="aot_eager"), reference_decay, x)
