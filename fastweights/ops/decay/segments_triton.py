"""What the decay and CCQ kernels share: how tokens are cut into segments, and how tiles are read and written.

A *segment* is up to L tokens of one document. Segments run in parallel; inside one, chunks of C tokens follow each other with the memory
in registers. A scan over the segments' own contributions gives each segment the memory it starts from. So the memory goes through device
memory once every L tokens, and a single long sequence still fills the card.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.tiles_triton import laid_out, operand

PROGRAMS = 512
"""Segments are made as long as they can be while this many programs are left: about two waves over an H200's 132 multiprocessors."""
LONGEST = 4096


class Tile(NamedTuple):
    """How one call is cut up. Tables of these replace autotuning; tests and users may pass their own."""

    chunk: int
    """C, tokens in one step of a program: a power of two, at least 16."""
    columns: int
    """Columns of the memory that one program holds at most: a power of two, at least 16 (64 in bfloat16)."""
    warps: int
    stages: int
    segment: int = 0
    """L, tokens of one segment, a multiple of C; 0 picks it from the size of the call."""


class Segments(NamedTuple):
    """The cut of one call."""

    number: int
    """Segments; with documents an upper bound, as their lengths stay on the device: the rest are empty."""
    length: int
    """L."""
    rows: int
    """R."""
    table: Tensor | None
    """With documents: each segment's row, first token, the token after its last, and the one after its document's last ``[count, 4]``."""
    first: Tensor | None
    """With documents: the first segment of every row, and their number ``[R + 1]``."""


def segment_length(tokens: int, heads: int, tile: Tile) -> int:
    """L for ``tokens`` tokens in all and ``heads`` programs for each of them."""
    if tile.segment:
        return tile.segment
    length = tile.chunk
    while length < LONGEST and tokens * heads >= 2 * length * PROGRAMS:
        length *= 2
    return length


def cut_segments(batch: int, tokens: int, length: int, cu_seqlens: Tensor | None) -> Segments:
    """Cut ``[batch, tokens]`` or packed documents into segments of ``length`` tokens, without waiting for the device."""
    if cu_seqlens is None:
        return Segments(batch * -(-tokens // length), length, batch, None, None)
    bounds = cu_seqlens.long()
    rows = len(bounds) - 1
    count = tokens // length + rows
    first = torch.zeros_like(bounds)
    torch.cumsum((bounds[1:] - bounds[:-1] + length - 1) // length, 0, out=first[1:])
    segment = torch.arange(count, device=bounds.device)
    row = torch.searchsorted(first[1:], segment, right=True).clamp(max=max(rows - 1, 0))
    start = bounds[row] + (segment - first[row]) * length
    document_end = bounds[row + 1]
    return Segments(count, length, rows, torch.stack([row, start, torch.minimum(start + length, document_end), document_end], 1), first)


def tokens_first(x: Tensor) -> Tensor:
    """``[B, T, H, K]`` such that token (b, t) lies at ``(b·T + t)·x.stride(1)`` with its heads side by side; copied only if it does not."""
    B, T, H, K = x.shape
    fits = (x.stride(3) == 1 or K == 1) and (x.stride(2) == K or H == 1) and (x.stride(0) == T * x.stride(1) or B == 1) and x.stride(1) > 0
    return x if fits else laid_out(x)


def dot_type(*dtypes: torch.dtype) -> tuple[tl.dtype, str]:
    """`operand`, in Triton's words."""
    dtype, precision = operand(*dtypes)
    return (tl.bfloat16 if dtype == torch.bfloat16 else tl.float32), precision


@triton.jit
def segment_of(s, table, T, L):
    """Row, first token, token after the last, token after the last of the row."""
    if table is None:
        per_row = tl.cdiv(T, L)
        row = (s // per_row).to(tl.int64)
        start = row * T + (s % per_row) * L
        row_end = row * T + T
        return row, start, tl.minimum(start + L, row_end), row_end
    else:
        entry = table + s.to(tl.int64) * 4
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def segments_of_row(row, first, T, L):
    """First segment of a row, and how many it has."""
    if first is None:
        per_row = tl.cdiv(T, L)
        return row.to(tl.int64) * per_row, per_row
    else:
        begin = tl.load(first + row)
        return begin, (tl.load(first + row + 1) - begin).to(tl.int32)


@triton.jit
def load_tile(base, start, end, stride, column, width, C: tl.constexpr, W: tl.constexpr):
    """Tokens ``start … start+C``, columns ``column … column+W``; zeros past ``end`` and past ``width``."""
    r = tl.arange(0, C)
    c = column + tl.arange(0, W)
    mask = (start + r < end)[:, None] & (c < width)[None, :]
    return tl.load(base + start * stride + r[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(base, x, start, end, stride, column, width, C: tl.constexpr, W: tl.constexpr):
    r = tl.arange(0, C)
    c = column + tl.arange(0, W)
    mask = (start + r < end)[:, None] & (c < width)[None, :]
    tl.store(base + start * stride + r[:, None] * stride + c[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(base, start, end, heads, h, other, C: tl.constexpr):
    """Head h's number of each token, float32, from ``[tokens, heads]``; ``other`` past ``end``, and everywhere if there is no tensor."""
    if base is None:
        return tl.full([C], other, tl.float32)
    else:
        r = tl.arange(0, C)
        return tl.load(base + start * heads + r * heads + h, mask=start + r < end, other=other)


@triton.jit
def store_numbers(base, x, start, end, heads, h, C: tl.constexpr):
    r = tl.arange(0, C)
    tl.store(base + start * heads + r * heads + h, x, mask=start + r < end)


@triton.jit
def load_memory(base, column, K, V, BK: tl.constexpr, BV: tl.constexpr):
    """A tile of a memory ``[K, V]``: all rows, columns ``column … column+BV``."""
    i = tl.arange(0, BK)
    c = column + tl.arange(0, BV)
    return tl.load(base + i[:, None] * V + c[None, :], mask=(i < K)[:, None] & (c < V)[None, :], other=0.0)


@triton.jit
def store_memory(base, S, column, K, V, BK: tl.constexpr, BV: tl.constexpr):
    i = tl.arange(0, BK)
    c = column + tl.arange(0, BV)
    tl.store(base + i[:, None] * V + c[None, :], S, mask=(i < K)[:, None] & (c < V)[None, :])


@triton.jit
def decay_matrix(coarse, fine, C: tl.constexpr):
    """``A[t, j] = exp(g_t − g_j)`` for j ≤ t, else 0, from the running sum g of log decays in two parts (see `load_decay`)."""
    i = tl.arange(0, C)
    g = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(i[:, None] >= i[None, :], g, -float("inf")))
