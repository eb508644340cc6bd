"""What kernels of more than one family share: operand types, where a piece of a document lies, and the inverse of a unit triangle."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def padded(size: int) -> int:
    """The power of two, at least 16, that holds ``size``: Triton's tiles are powers of two, and the tensor cores want 16."""
    return max(16, triton.next_power_of_2(size))


def operand(*dtypes: torch.dtype) -> tuple[torch.dtype, str]:
    """The type in which the tensor cores read their operands, and the precision of their float32 products.

    float16 goes through tf32: as many digits, but float32's range, which unnormalised keys need. float32 goes through three tf32 products.
    """
    if all(dtype == torch.bfloat16 for dtype in dtypes):
        return torch.bfloat16, "tf32"
    return torch.float32, "tf32" if all(dtype in (torch.float16, torch.bfloat16) for dtype in dtypes) else "tf32x3"


def rows_side_by_side(x: Tensor) -> Tensor:
    """x ``[B, T, H, K]`` itself where its last dimension is dense (a slice of a fused projection is), else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def laid_out(x: Tensor) -> Tensor:
    """A dense copy, of which every stride is what the shape says; `contiguous` leaves that of a single token as it is, whatever it is."""
    return x.clone(memory_format=torch.contiguous_format)


class Pieces(NamedTuple):
    """How ``[B, T]`` or packed documents are cut into pieces of equal size, known without reading ``cu_seqlens`` on the host.

    Document d's first piece has number ``cu_seqlens[d] // size + d``. Numbers never collide, a few stay unused, and their count
    ``T // size + documents`` depends on shapes alone.
    """

    total: int
    """Numbers given out; with documents some of them name no token."""
    size: int
    """Tokens of a piece (the last of a document may be shorter)."""
    owner: Tensor | None
    """With documents: the document of each piece ``[count]``, int32. None for ``[B, T]``."""


def cut(batch: int, tokens: int, size: int, cu_seqlens: Tensor | None) -> Pieces:
    """Every row has at least one piece, which may be empty."""
    count = piece_count(batch, tokens, size, cu_seqlens)
    if cu_seqlens is None:
        return Pieces(count, size, None)
    documents = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device)
    first = torch.div(cu_seqlens[:-1], size, rounding_mode="floor") + documents
    owner = torch.searchsorted(first, torch.arange(count, device=cu_seqlens.device), right=True) - 1
    return Pieces(count, size, owner.to(torch.int32))


def piece_count(batch: int, tokens: int, size: int, cu_seqlens: Tensor | None) -> int:
    return batch * max(1, -(-tokens // size)) if cu_seqlens is None else tokens // size + cu_seqlens.shape[0] - 1


@triton.jit
def first_piece(row, bounds, T, SIZE):
    """The number of a row's first piece of SIZE tokens."""
    if bounds is None:
        return row * tl.maximum(tl.cdiv(T, SIZE), 1)
    else:
        return tl.load(bounds + row).to(tl.int64) // SIZE + row


@triton.jit
def locate(piece, owner, bounds, T, SIZE):
    """Of a piece: its row, the entry of the batch that holds its tokens, their bounds in that entry, and the row's bounds there."""
    if bounds is None:
        pieces = tl.maximum(tl.cdiv(T, SIZE), 1)
        row = (piece // pieces).to(tl.int64)
        batch = row
        begin = row * 0
        stop = begin + T
    else:
        row = tl.load(owner + piece).to(tl.int64)
        batch = row * 0
        begin = tl.load(bounds + row).to(tl.int64)
        stop = tl.load(bounds + row + 1).to(tl.int64)
    first = begin + (piece - first_piece(row, bounds, T, SIZE)).to(tl.int64) * SIZE
    return row, batch, first, tl.minimum(first + SIZE, stop), begin, stop


@triton.jit
def substitute(A, N: tl.constexpr):
    """``(I + A)⁻¹`` of N strictly lower triangular 16×16 blocks by forward substitution: column j of A leaves every row below j."""
    i = tl.arange(0, 16)
    X = tl.where(i[None, :, None] == i[None, None, :], 1.0, tl.zeros([N, 16, 16], tl.float32))
    for j in tl.static_range(15):
        column = tl.sum(tl.where(i[None, None, :] == j, A, 0.0), 2)
        row = tl.sum(tl.where(i[None, :, None] == j, X, 0.0), 1)
        X -= column[:, :, None] * row[:, None, :]
    return X


@triton.jit
def unit_lower_inverse(A, C: tl.constexpr):
    """``(I + A)⁻¹`` for strictly lower triangular A ``[C, C]``, all in float32: C is 16, 32 or 64.

    Blocks of 16 by substitution, then twice the size at a time: the lower left block of the inverse is −X₂₂ A₂₁ X₁₁. No power of A is
    formed, so keys that repeat under β near 2 cost no digits. Blocks are picked by masked sums over axes that a warp holds in its registers
    (of the tensor cores' 64×64 result it owns 16 rows): no data moves.
    """
    N: tl.constexpr = C // 16
    n = tl.arange(0, N)
    same = (n[:, None] == n[None, :])[:, None, :, None]
    blocks = tl.reshape(A, [N, 16, N, 16])
    X = substitute(tl.sum(tl.where(same, blocks, 0.0), 2), N)
    if N == 1:
        return tl.reshape(X, [C, C])
    else:
        h = tl.arange(0, 2)
        left = ((n[:, None] - 1 == n[None, :]) & (n[:, None] % 2 == 1))[:, None, :, None]
        A21 = tl.sum(tl.where(left, blocks, 0.0), 2)
        X11 = tl.sum(tl.where((h == 0)[None, :, None, None], tl.reshape(X, [N // 2, 2, 16, 16]), 0.0), 1)
        X11 = tl.reshape(tl.broadcast_to(X11[:, None, :, :], [N // 2, 2, 16, 16]), [N, 16, 16])
        X21 = tl.dot(tl.dot(X, A21, input_precision="tf32x3"), X11, input_precision="tf32x3")
        X = tl.reshape(tl.where(same, X[:, :, None, :], 0.0) - tl.where(left, X21[:, :, None, :], 0.0), [C, C])
        if N == 4:
            low = (tl.arange(0, C) >= 32)[:, None]
            first = (h == 0)[None, :, None]
            A21 = tl.where(low, tl.sum(tl.where(first, tl.reshape(A, [C, 2, 32]), 0.0), 1), 0.0)
            X11 = tl.where(low, 0.0, tl.sum(tl.where(first, tl.reshape(X, [C, 2, 32]), 0.0), 1))
            X22 = tl.sum(tl.where(first, 0.0, tl.reshape(X, [C, 2, 32])), 1)
            X21 = tl.dot(A21, tl.sum(tl.reshape(X11, [2, 32, 32]), 0), input_precision="tf32x3")
            X21 = tl.dot(X22, tl.sum(tl.reshape(X21, [2, 32, 32]), 0), input_precision="tf32x3")
            X -= tl.reshape(tl.where(first, X21[:, None, :], 0.0), [C, C])
        return X


@triton.jit
def dithered(x, C: tl.constexpr):
    """x ``[C, C]`` float32 with the digits of bfloat16: rounded up or down by a threshold that differs from row to row.

    Where all keys are alike, a whole diagonal of the inverse is one number. Rounded to the nearest it errs alike in every row, a walk adds
    these errors up over its chunk, and with β = 1.9 and 16,384 equal keys reads are wrong by half. Thresholds at multiples of the golden
    ratio make every few neighbours' errors cancel. What bfloat16 holds exactly stays as it is.
    """
    threshold = (tl.arange(0, C) * 40503) & 0xFFFF  # 2¹⁶ (√5 − 1) / 2
    bits = (x.to(tl.int32, bitcast=True) + threshold[:, None]) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
