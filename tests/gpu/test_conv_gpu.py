"""The convolution's kernels compiled, against torch's convolution in float64."""

import pytest
import torch

from tests.ops.grid import bounds, compare
from tests.ops.test_conv import differentiate, operands, plain, plain_packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.conv.causal_triton import causal_conv_triton
    from fastweights.ops.conv.step_triton import causal_conv_step_triton_

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = [0, 5, 1, 0, 2, 700, 3, 0]


def check(x, form, plain_form):
    dtype = x[0].dtype
    card = [None if t is None else t.cuda() for t in x]
    wide, single = ([None if t is None else t.to(real) for t in card] for real in (torch.float64, torch.float32))
    compare(
        differentiate_on_card(form, card),
        differentiate_on_card(plain_form, single),
        differentiate_on_card(plain_form, wide),
        precision=dtype,
    )


def differentiate_on_card(form, x):
    """The upstream gradients are drawn on the CPU, so the outputs go there."""
    return differentiate(lambda *leaves: tuple(t.cpu() for t in form(*leaves)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("T, W, bias", [(1, 4, True), (2, 4, False), (37, 3, True), (700, 4, True), (65, 1, False), (65, 7, True)])
def test_it_is_torchs_convolution(T, W, bias, activation, dtype):
    x = operands(T=T, channels=200, W=W, bias=bias, dtype=dtype)
    check(
        x,
        lambda x, w, b, s: causal_conv_triton(x, w, bias=b, state=s, activation=activation),
        lambda x, w, b, s: plain(x, w, b, s, activation),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_documents_are_the_documents_apart(dtype):
    x = operands(B=1, T=sum(LENGTHS), channels=130, rows=len(LENGTHS), dtype=dtype)
    edges = bounds(LENGTHS)
    check(
        x,
        lambda x, w, b, s: causal_conv_triton(x, w, bias=b, state=s, cu_seqlens=edges.cuda()),
        lambda x, w, b, s: plain_packed(x, w, b, s, edges.tolist()),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, W, bias", [(1, 1, 4, False), (64, 1, 4, True), (3, 2, 4, False), (2, 7, 3, True), (2, 3, 1, True)])
def test_steps_in_place_are_torchs_convolution(B, T, W, bias, dtype):
    x, weight, bias, state = (None if t is None else t.cuda() for t in operands(B=B, T=T, channels=600, W=W, bias=bias, dtype=dtype))
    single, wide = ([None if t is None else t.to(real) for t in (x, weight, bias, state)] for real in (torch.float32, torch.float64))
    kept, address = state.clone(), state.data_ptr()
    y = causal_conv_step_triton_(x, weight, state, bias=bias)
    compare({"y": y.cpu()}, {"y": plain(*single)[0].cpu()}, {"y": plain(*wide)[0].cpu()}, precision=dtype)
    assert torch.equal(state, torch.cat([kept, x], dim=1)[:, T:]) and state.data_ptr() == address
