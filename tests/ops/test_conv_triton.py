"""The convolution's kernels in Triton's interpreter against its plain form."""

import pytest
import torch

pytest.importorskip("triton")

from fastweights.ops.conv.causal import causal_conv
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


def test_fake_shapes_are_the_real_ones():
    x, weight, bias, state = (t.requires_grad_() for t in operands(B=1, T=38, rows=7, dtype=torch.float32))
    args = (x, weight, bias, state, bounds(LENGTHS), True)
    torch.library.opcheck(_forward, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
