"""Projections of one token: the kernel in Triton's interpreter against the plain form."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

pytest.importorskip("triton")

from fastweights.ops import dispatch, gated_linears, linears
from fastweights.ops.token import matvec_triton
from fastweights.ops.token.matvec_triton import matvec_triton as matvec
from tests.ops.grid import compare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")


def forms(dtype, D, N, M):
    x, weight, other = torch.randn(1, 1, D), torch.randn(N, D) / D**0.5, torch.randn(max(M, 1), D) / D**0.5
    return [[t.to(dtype).to(kind) for t in (x, weight, other)] for kind in (dtype, dtype, torch.float64)]


@pytest.mark.parametrize("D, N, M", [(40, 6, 11), (1536, 9, 3), (3100, 5, 0), (16, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_products_are_the_plain_ones(D, N, M, dtype, monkeypatch):
    """Rows that fill no program, and columns that fill no piece; the second matrix with or without."""
    monkeypatch.setattr(matvec_triton, "FULL", 3)  # as many rows a program as there are, and not only two
    (x, w, u), plain, exact = forms(dtype, D, N, M)
    y, z = matvec(x.unflatten(-1, (2, -1)), w, u if M else None, False)
    names = ("y", "z")[: 2 if M else 1]
    found = dict(zip(names, (y, z), strict=False))
    others = [dict(zip(names, (F.linear(x, w), F.linear(x, u)), strict=False)) for x, w, u in (plain, exact)]
    compare(found, *others)
    assert M or z.shape == (1, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("D, N", [(40, 6), (1600, 7)])
def test_a_gated_product_is_the_plain_one(D, N, dtype):
    (x, w, u), plain, exact = forms(dtype, D, N, N)
    y, z = matvec(x, w, u, True)
    compare({"y": y}, *({"y": F.silu(F.linear(x, w)) * F.linear(x, u)} for x, w, u in (plain, exact)))
    assert z.numel() == 0


def test_fake_shapes_are_the_real_ones():
    x, w, u = torch.randn(1, 1, 16), torch.randn(6, 16), torch.randn(6, 16)
    for arguments in ((x, w, None, False), (x, w, u, False), (x, w, u, True)):
        torch.library.opcheck(matvec, arguments, test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
def test_weights_that_do_not_fit_never_reach_the_kernel(monkeypatch):
    """It would read past their end."""
    called = []
    monkeypatch.setattr(matvec_triton, "matvec_triton", lambda x, *others: called.append(others) or (x, x))
    monkeypatch.setattr(dispatch, "twin", lambda *names: matvec_triton)
    with FakeTensorMode():
        x, fits, narrow, few = (torch.empty(shape, dtype=torch.float16, device="cuda:0") for shape in ((1, 1, 8), (5, 8), (5, 7), (1, 8)))
        linears(x, (fits, few))
        gated_linears(x, fits, fits)
        assert len(called) == 2
        for weight in (narrow, torch.empty(5, 8, dtype=torch.float16)):
            with contextlib.suppress(RuntimeError):  # torch's own error, of a product without a card
                linears(x, (fits, weight))
            assert gated_linears(x, fits, weight) is None
        assert gated_linears(x, fits, few) is None and len(called) == 2
