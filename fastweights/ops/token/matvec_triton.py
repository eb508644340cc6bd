"""Two projections of one token in one launch, or both halves of a gated one with their product.

A program owns BN rows of a matrix. It asks for AT_ONCE pieces of them before it looks at x, so that what the card waits for is its memory:
of cuBLAS's products of one row, reading 85 MB of weights a layer takes 44 µs on an H200, where the memory needs 20.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, AT_ONCE = 512, 6
"""Columns of a piece, and how many of them a program has under way."""
LONG = 4096
"""Rows of so many columns take two warps a program and not four: W_down of kla-0.4b 6.6 µs instead of 7.3 on an H200."""
FULL = 700
"""Programs that fill the card: about five for each multiprocessor of an H200."""


@triton.jit
def piece(weight, n, kk, N, D: tl.constexpr):
    """Rows n and columns kk of a matrix ``[N, D]``."""
    return tl.load(weight + n.to(tl.int64)[:, None] * D + kk[None, :], mask=(n < N)[:, None] & (kk < D)[None, :], other=0.0)


@triton.jit
def matvec_kernel(
    x, weight, other, y, z, N, M, D: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """y = weight x, and z = other x; GATED: y = SiLU(weight x) · other x."""
    tile = tl.program_id(0)
    if other is not None and not GATED:
        behind = tile - tl.cdiv(N, BN)
        if behind >= 0:
            tile, weight, y, N = behind, other, z, M
    n = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    sums = tl.zeros([BN, BK], tl.float32)
    gates = tl.zeros([BN, BK], tl.float32)
    same = n[:, None] * 0  # x is read for every row, out of the nearest cache: to hand it on between threads would take barriers
    for start in tl.static_range(0, D, BK * AT_ONCE):
        pieces, others, inputs = (), (), ()
        for i in tl.static_range(AT_ONCE):
            if start + i * BK < D:
                pieces = pieces + (piece(weight, n, start + i * BK + k, N, D),)  # type: ignore[assignment]  # noqa: RUF005 - Triton's Python
                if GATED:
                    others = others + (piece(other, n, start + i * BK + k, N, D),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(AT_ONCE):
            if start + i * BK < D:
                kk = start + i * BK + k[None, :]
                inputs = inputs + (tl.load(x + same + kk, mask=kk < D, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(AT_ONCE):
            if start + i * BK < D:
                value = inputs[i].to(tl.float32)  # type: ignore[var-annotated]
                if GATED:
                    gates += pieces[i].to(tl.float32) * value
                    sums += others[i].to(tl.float32) * value
                else:
                    sums += pieces[i].to(tl.float32) * value
    out = tl.sum(sums, 1)
    if GATED:
        gate = tl.sum(gates, 1)
        out *= gate / (1.0 + tl.exp(-gate))
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)


@torch.library.custom_op("fastweights::matvec", mutates_args=())
def matvec_triton(x: Tensor, weight: Tensor, other: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    """``weight x`` and ``other x`` (empty without) of ``x [1, 1, D]``, or by heads; or SiLU(weight x) · other x, and an empty tensor."""
    x = x.contiguous()
    y, z = _shapes(x, weight, other, gated)
    N, M = y.shape[-1], z.shape[-1]
    BN = next((size for size in (16, 8, 4) if (N + M) // size >= FULL), 2)
    matvec_kernel[(triton.cdiv(N, BN) + triton.cdiv(M, BN),)](
        x, weight, other, y, z, N, M, D=x.numel(), GATED=gated, BN=BN, BK=COLUMNS, AT_ONCE=max(1, AT_ONCE // (2 if gated else 1)),
        num_warps=2 if x.numel() >= LONG else 4,
    )  # fmt: skip
    return y, z


@matvec_triton.register_fake
def _shapes(x, weight, other, gated):
    return x.new_empty(1, 1, weight.shape[0]), x.new_empty(1, 1, 0 if gated or other is None else other.shape[0])
