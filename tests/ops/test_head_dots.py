"""Sums over a head's channels: the kernel in Triton's interpreter against the plain form."""

import pytest
import torch

pytest.importorskip("triton")

from fastweights.ops.token.head_dots import head_dots
from fastweights.ops.token.head_dots_triton import head_dots_triton
from tests.ops.grid import compare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("B, T, H, K, weighted", [(2, 33, 3, 96, False), (1, 7, 2, 256, True), (3, 5, 1, 1, True), (1, 0, 2, 16, False)])
def test_it_is_the_plain_form(B, T, H, K, weighted, dtype):
    """Of heads that lie in the middle of a wider projection, as a layer has them."""
    wide = torch.randn(B, T, H * K + 5, dtype=dtype)
    x = wide[..., 2 : 2 + H * K].unflatten(-1, (H, K))
    weight = torch.randn(H, K) if weighted else None
    exact = head_dots(x.double(), weight)
    compare({"y": head_dots_triton(x, weight)}, {"y": head_dots(x, weight)}, {"y": exact})


def test_its_gradient():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float16, requires_grad=True)
    up = torch.randn(2, 5, 3)
    (got,) = torch.autograd.grad(head_dots_triton(x, None), x, up)
    (plain,) = torch.autograd.grad(head_dots(x), x, up)
    exact = 2 * up.double().unsqueeze(-1) * x.detach().double()
    compare({"dx": got}, {"dx": plain}, {"dx": exact})
    with pytest.raises(RuntimeError, match="has no gradient"):
        head_dots_triton(x, torch.randn(3, 8))


def test_fake_shapes_are_the_real_ones():
    x = torch.randn(2, 3, 2, 8)
    for weight in (None, torch.randn(2, 8)):
        torch.library.opcheck(head_dots_triton, (x, weight), test_utils=("test_schema", "test_faketensor"))
