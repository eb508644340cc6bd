"""The short convolution against torch's own, and its state, packing and gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fastweights.ops.conv.causal import causal_conv
from tests.ops.grid import bounds, compare

LENGTHS = [0, 5, 1, 0, 2, 70, 3, 0]


def operands(B=2, T=37, channels=6, W=4, rows=None, dtype=torch.float64, bias=True):
    x, weight = torch.randn(B, T, channels, dtype=dtype), torch.randn(channels, W, dtype=dtype)
    return x, weight, torch.randn(channels, dtype=dtype) if bias else None, torch.randn(rows or B, W - 1, channels, dtype=dtype)


def plain(x, weight, bias, state, activation=True):
    """torch.nn.functional.conv1d over state and input."""
    laid = torch.cat([state, x], dim=1)
    if x.shape[1] == 0:
        return x, state
    y = F.conv1d(laid.mT, weight.unsqueeze(1), bias, groups=len(weight)).mT
    return F.silu(y) if activation else y, laid[:, x.shape[1] :]


def plain_packed(x, weight, bias, state, edges):
    pieces = [plain(x[:, a:b], weight, bias, state[i : i + 1]) for i, (a, b) in enumerate(pairwise(edges))]
    return torch.cat([y for y, _ in pieces], dim=1), torch.cat([s for _, s in pieces])


def differentiate(form, operands, seed=1):
    leaves = [None if t is None else t.detach().requires_grad_() for t in operands]
    outputs = form(*leaves)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs]
    grads = torch.autograd.grad(outputs, [t for t in leaves if t is not None], upstream, allow_unused=True)
    names = ["y", "final state", *(n for n, t in zip(("x", "weight", "bias", "state"), leaves, strict=True) if t is not None)]
    return {n: t.detach() for n, t in zip(names, (*outputs, *grads), strict=True)}


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("T", [1, 2, 3, 37])
def test_it_is_torchs_convolution(T, W, bias, activation):
    x = operands(T=T, W=W, bias=bias)
    got = differentiate(lambda x, w, b, s: causal_conv(x, w, bias=b, state=s, activation=activation), x)
    want = differentiate(lambda x, w, b, s: plain(x, w, b, s, activation), x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-13, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_as_good_as_torchs(dtype):
    x = [t.to(dtype) for t in operands(T=130, channels=16)]
    compare(
        differentiate(lambda x, w, b, s: causal_conv(x, w, bias=b, state=s), x),
        differentiate(plain, x),
        differentiate(plain, [t.double() for t in x]),
    )


@pytest.mark.parametrize("W", [1, 2, 4, 5])
def test_packed_documents_are_the_documents_apart(W):
    x = operands(B=1, T=sum(LENGTHS), W=W, rows=len(LENGTHS))
    edges = bounds(LENGTHS)
    got = differentiate(lambda x, w, b, s: causal_conv(x, w, bias=b, state=s, cu_seqlens=edges), x)
    want = differentiate(lambda x, w, b, s: plain_packed(x, w, b, s, edges.tolist()), x)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-13, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


def test_documents_do_not_touch():
    x, weight, bias, _ = operands(B=1, T=sum(LENGTHS), dtype=torch.float32)
    edges = bounds(LENGTHS)
    other = x.clone()
    other[:, 8:78] += 1  # the document of 70 tokens
    y, state = causal_conv(x, weight, bias=bias, cu_seqlens=edges)
    y_, state_ = causal_conv(other, weight, bias=bias, cu_seqlens=edges)
    same = torch.ones(x.shape[1], dtype=torch.bool)
    same[8:78] = False
    assert torch.equal(y[:, same], y_[:, same]) and not torch.equal(y, y_)
    others = [i for i in range(len(LENGTHS)) if i != 5]
    assert torch.equal(state[others], state_[others]) and not torch.equal(state, state_)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 5, 64]), min_size=1, max_size=6), st.integers(1, 5), st.booleans())
def test_any_split_of_a_sequence_gives_the_same(pieces, W, given_state):
    x, weight, bias, state = operands(T=sum(pieces), W=W, dtype=torch.float32)
    state = state if given_state else None
    y, final = causal_conv(x, weight, bias=bias, state=state)
    outputs = []
    for piece in x.split(pieces, dim=1):
        out, state = causal_conv(piece, weight, bias=bias, state=state)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=1), y, rtol=1e-6, atol=1e-6)  # exp differs by an ulp between a vector and its tail
    assert torch.equal(state, final)


def test_without_a_state_the_past_is_zeros():
    x, weight, bias, state = operands()
    y, final = causal_conv(x, weight, bias=bias)
    y_, final_ = causal_conv(x, weight, bias=bias, state=torch.zeros_like(state))
    assert torch.equal(y, y_) and torch.equal(final, final_)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [0, 1, 5])
def test_state_is_fresh_and_operands_are_left_alone(T, packed):
    x, weight, bias, state = operands(B=1, T=T)
    before = [t.clone() for t in (x, weight, bias, state)]
    _, final = causal_conv(x, weight, bias=bias, state=state, cu_seqlens=torch.tensor([0, T]) if packed else None)
    final.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias, state), strict=True))


def test_strided_input_and_stride_0_upstream():
    wide = torch.randn(2, 20, 13, dtype=torch.float64)
    x, (_, weight, bias, state) = wide[..., 3:9].requires_grad_(), operands()
    y, _ = causal_conv(x, weight, bias=bias, state=state)
    y_, _ = plain(x, weight, bias, state)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, y_)), rtol=1e-13, atol=1e-13)


def test_no_tokens():
    x, weight, bias, state = operands(T=0)
    y, final = causal_conv(x, weight, bias=bias, state=state)
    assert y.shape == x.shape and torch.equal(final, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 5)}, r"x must be \[B, T, Ch\]"),
        ({"weight": torch.zeros(7, 4)}, r"weight must be \[Ch, W\]"),
        ({"weight": torch.zeros(6, 0)}, "at least one tap"),
        ({"bias": torch.zeros(5)}, r"bias must be \[Ch\]"),
        ({"state": torch.zeros(2, 4, 6)}, r"state must be \[R, W−1, Ch\]"),
        ({"x": torch.zeros(2, 5, 6, dtype=torch.int64)}, "x must be float16"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "the batch must be 1; got B = 2"),
    ],
)
def test_bad_operands_are_named(change, message):
    given = {"x": torch.zeros(2, 5, 6), "weight": torch.zeros(6, 4)} | change
    with pytest.raises(ValueError, match=message):
        causal_conv(**given)


@pytest.mark.compile
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_a_graph_break(packed):
    x, weight, bias, state = operands(B=1, T=9)
    edges = torch.tensor([0, 9]) if packed else None
    form = torch.compile(causal_conv, fullgraph=True, backend="aot_eager")
    got = differentiate(lambda x, w, b, s: form(x, w, bias=b, state=s, cu_seqlens=edges), (x, weight, bias, state))
    want = differentiate(plain, (x, weight, bias, state))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-13, atol=1e-13)
