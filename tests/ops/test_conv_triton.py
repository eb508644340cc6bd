"""The convolution's kernels in Triton's interpreter against its plain form."""

import pytest
import torch

pytest.importorskip("triton")

from fastweights.ops.conv.causal import causal_conv, causal_conv_step_
from fastweights.ops.conv.causal_triton import _forward, causal_conv_triton
from tests.ops.grid import bounds, compare
from tests.ops.test_conv import differentiate, operands

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")

LENGTHS = [0, 1, 2, 0, 30, 5, 0]


def check(x, **options):
    runs = []
    for form, dtype in ((causal_conv_triton, None), (causal_conv, None), (causal_conv, torch.float64)):
        cast = [None if t is None else t.to(dtype or t.dtype) for t in x]
        runs.append(differentiate(lambda x, w, b, s, form=form: form(x, w, bias=b, state=s, **options), cast))
    compare(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("T, W, bias, activation", [(20, 4, True, True), (2, 3, False, True), (5, 1, True, False)])
def test_it_is_the_plain_form(T, W, bias, activation, dtype):
    check(operands(T=T, W=W, bias=bias, dtype=dtype), activation=activation)


def test_packed_documents_are_the_plain_ones():
    check(operands(B=1, T=38, rows=7, dtype=torch.float32), cu_seqlens=bounds(LENGTHS))


def test_no_tokens_hand_the_state_on():
    check(operands(T=0, dtype=torch.float32))


def test_a_slice_of_a_projection_is_read_where_it_lies():
    wide = torch.randn(2, 20, 11)
    weight = torch.randn(6, 4)
    assert torch.equal(causal_conv_triton(wide[..., 2:8], weight)[0], causal_conv_triton(wide[..., 2:8].contiguous(), weight)[0])


def test_operands_with_strides_of_their_own():
    """Also a single token, of which torch calls dense what has any stride of T."""
    step = pytest.importorskip("fastweights.ops.conv.step_triton")
    weight, bias = torch.randn(6, 4), torch.randn(12)[::2]
    for x in (torch.randn(2, 6, 1).mT, torch.randn(2, 1, 6).as_strided((2, 1, 6), (6, 0, 1)), torch.randn(2, 6, 5).mT):
        check([x, weight, bias, None])
        stepped = step.causal_conv_step_triton_(x, weight, torch.zeros(2, 3, 6), bias=bias)
        torch.testing.assert_close(stepped, causal_conv(x, weight, bias=bias)[0])


@pytest.mark.parametrize("T, W, channels", [(1, 4, 300), (2, 4, 6), (5, 3, 6), (3, 1, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_in_place_are_the_plain_form(T, W, channels, dtype):
    """More tokens than the state holds, fewer, and as many; more channels than one program has."""
    step = pytest.importorskip("fastweights.ops.conv.step_triton")
    x, weight, bias, state = operands(T=T, channels=channels, W=W, dtype=dtype)
    wide = torch.cat([x, x], dim=2)[..., : x.shape[2]]
    kept, address = state.clone(), state.data_ptr()
    y = step.causal_conv_step_triton_(wide, weight, state, bias=bias)
    expected, last = causal_conv(x, weight, bias=bias, state=kept)
    exact = causal_conv(x.double(), weight.double(), bias=bias.double(), state=kept.double())[0]
    compare({"y": y}, {"y": expected}, {"y": exact})
    assert torch.equal(state, last) and state.data_ptr() == address
    plain = causal_conv_step_(x, weight, kept, bias=bias)
    assert torch.equal(plain, expected) and torch.equal(kept, last)


def test_a_step_wants_a_state_that_it_can_write_into():
    step = pytest.importorskip("fastweights.ops.conv.step_triton")
    x, weight, _, state = operands(T=1, dtype=torch.float32)
    for bad in (state.double(), state.mT.contiguous().mT):
        with pytest.raises(ValueError, match="needs a dense state"):
            step.causal_conv_step_triton_(x, weight, bad)
    torch.library.opcheck(step._step, (x, weight, None, state, True), test_utils=("test_schema", "test_faketensor"))


def test_fake_shapes_are_the_real_ones():
    x, weight, bias, state = (t.requires_grad_() for t in operands(B=1, T=38, rows=7, dtype=torch.float32))
    args = (x, weight, bias, state, bounds(LENGTHS), True)
    torch.library.opcheck(_forward, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
