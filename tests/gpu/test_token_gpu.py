"""What is made of each token by itself, on a card: sums over heads, and gates of float32 by the digits."""

import pytest
import torch
from torch.nn import functional as F

from fastweights.ops.token.head_dots import MANY, head_dots
from fastweights.ops.token.linear import gated_linears, linears
from fastweights.precision import Float32Linear
from tests.ops.grid import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("B, T, H, K", [(1, 700, 12, 96), (2, MANY, 3, 256), (3, 65, 1, 20)])
def test_head_dots(B, T, H, K, weighted, dtype):
    x = torch.randn(B, T, H * K + 64, device="cuda", dtype=dtype)[..., 64:].unflatten(-1, (H, K))
    weight = torch.randn(H, K, device="cuda") if weighted else None
    with torch.no_grad():
        got, again = head_dots(x, weight), head_dots(x, weight)
    plain = (x.float() * (x.float() if weight is None else weight)).sum(-1)
    assert torch.equal(got, again)
    compare({"y": got}, {"y": plain}, {"y": head_dots(x.double(), weight)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_squares(dtype):
    x = torch.randn(1, 700, 3, 96, device="cuda", dtype=dtype)
    up = torch.randn(1, 700, 3, device="cuda")
    found = []
    for form, kind in ((head_dots, dtype), (lambda x: x.float().square().sum(-1), dtype), (head_dots, torch.float64)):
        leaf = x.to(kind).requires_grad_()
        found.append({"dx": torch.autograd.grad(form(leaf), leaf, up.to(kind) if kind == torch.float64 else up)[0]})
    compare(*found)


@pytest.mark.parametrize("bias", [True, False])
def test_gates_of_bfloat16_have_the_digits_of_float32(bias):
    """Twice the error of a float32 product without tensor cores, and what those cut off of sums."""
    gate = Float32Linear(1536, 12, bias=bias).cuda()
    x = torch.randn(1, 5000, 1536, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, few = gate(x), gate(x[:, : MANY - 1])
        plain, exact = gate(x.float()), gate.double()(x.double())
    assert got.dtype == torch.float32
    compare({"y": got}, {"y": plain}, {"y": exact}, few=32)
    compare({"y": few}, {"y": plain[:, : MANY - 1]}, {"y": exact[:, : MANY - 1]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D, N, M", [(1536, 4608, 2304), (2304, 1536, 0), (6144, 1536, 0), (100, 7, 3)])
def test_projections_of_one_token(D, N, M, dtype):
    x, weights = torch.randn(1, 1, D, device="cuda", dtype=dtype), []
    for rows in [N, M] if M else [N]:
        weights.append((torch.randn(rows, D, device="cuda") / D**0.5).to(dtype))
    with torch.no_grad():
        got, again = linears(x, tuple(weights)), linears(x, tuple(weights))
        plain, exact = (linears(x.to(kind), tuple(w.to(kind) for w in weights)) for kind in (torch.float32, torch.float64))
    assert all(map(torch.equal, got, again)) and got[0].dtype == dtype
    compare(*({str(i): y for i, y in enumerate(form)} for form in (got, plain, exact)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D, N", [(1536, 6144), (100, 7)])
def test_both_halves_of_a_gated_projection(D, N, dtype):
    x = torch.randn(1, 1, D, device="cuda", dtype=dtype)
    gate, up = ((torch.randn(N, D, device="cuda") / D**0.5).to(dtype) for _ in range(2))
    with torch.no_grad():
        got, again = gated_linears(x, gate, up), gated_linears(x, gate, up)
    plain, exact = (
        F.silu(F.linear(x.to(kind), gate.to(kind))) * F.linear(x.to(kind), up.to(kind)) for kind in (torch.float32, torch.float64)
    )
    assert torch.equal(got, again)
    compare({"y": got}, {"y": plain}, {"y": exact})
