"""CCQ's forward kernels: q' = q − (λ/w)·C q, with C the centred second moment of the keys so far, all counted alike.

Three launches. `moment_kernel` measures each segment's keys from a point b in their midst, the mean of the first chunk, and leaves
x = k − b, rounded as the tensor cores take it, the sum of x before each chunk, and the segment's own (C, μ, w). `merge_kernel` makes of it
what comes before each segment by Chan's formula, and leaves it as the next one wants it: R, about b. `read_kernel` reads a block of queries
as attention would: R once, then the segment's keys up to the block. With m = μ − b before the segment, R = C + w m mᵀ and y = w m + Σ x
before the block:

    merge   C' = C + C₂ + (w·w₂ / w')·δ δᵀ,   μ' = μ + (w₂ / w')·δ,   w' = w + w₂,   δ = μ₂ − μ
    read    C_t q_t = R q_t + Σ (q_tᵀ x_j) x_j  over earlier blocks − ρ_t y + Σ_{j≤t} (q_tᵀ x_j − ρ_t) x_j  in the block itself,
            ρ_t = q_tᵀ(μ_t − b) = (q_tᵀ y + Σ_{j≤t} q_tᵀ x_j) / w_t

x is of the size of the keys' spread, so half precision loses nothing where keys crowd; all sums are of the rounded x, so that C stays a sum
of squares. Nothing depends on b but the rounding. No program carries a memory from block to block: segments are short, and all blocks of
all segments run side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.decay.segments_triton import (
    PROGRAMS,
    Segments,
    dot_type,
    load_memory,
    load_numbers,
    load_tile,
    segment_of,
    segments_of_row,
    store_memory,
    store_numbers,
    store_tile,
)
from fastweights.ops.launch_triton import compiled_together, launch
from fastweights.ops.tiles_triton import operand, padded

LONGEST = 256
"""Tokens of a segment at most. A longer one writes fewer sums (at 256 and K = 128 in float32 they are as large as the keys), and has more
keys a query to multiply."""


class Shape(NamedTuple):
    """Of one kind of kernel."""

    chunk: int
    """Tokens of a block, or of a step: a power of two, at least 16."""
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How one call is cut up, kernel by kernel. The chunk of ``read`` is a multiple of that of ``moment``."""

    read: Shape
    key: Shape
    moment: Shape
    pair: Shape
    segment: int = 0
    """L, a multiple of all chunks; 0 picks it from the size of the call."""


def one_shape(shape: Shape, segment: int = 0) -> Tiles:
    return Tiles(shape, shape, shape, shape, segment)


def segment_length(tokens: int, heads: int, tiles: Tiles) -> int:
    """L for ``tokens`` tokens in all."""
    if tiles.segment:
        return tiles.segment
    length = max(shape.chunk for shape in tiles[:4])
    while length < LONGEST and tokens * heads >= 2 * length * PROGRAMS:
        length *= 2
    return length


class Moments(NamedTuple):
    """Second moment, mean and weight: of a segment alone or of a row C, μ, w; of all before a segment R, μ, w."""

    second: Tensor
    """C, float32, or R, in the tensor cores' type ``[segments or rows, H, K, K]``."""
    mean: Tensor
    """``[…, H, K]``, float32."""
    weight: Tensor
    """``[…, H]``, float32."""


class Keys(NamedTuple):
    """The keys as the kernels read them."""

    x: Tensor
    """k − b ``[B, T, H, K]``, in the tensor cores' type."""
    sums: Tensor
    """Of every chunk of 64 (or fewer) tokens, the sum of x in its segment before it ``[segments, chunks of one, H, K]``."""
    point: Tensor
    """b ``[segments, H, K]``."""


@triton.jit
def moment_kernel(
    k, ks, x_out, sums, point, covariance, mean, weight, table, T, L, H, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    _, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    k += h * K
    x_out += h * K
    sums += (s.to(tl.int64) * (L // C) * H + h) * K
    first = load_tile(k, begin, end, stride, 0, K, C, BK).to(tl.float32) * load_numbers(ks, begin, end, H, h, 1.0, C)[:, None]
    b = tl.sum(first, 0) / tl.maximum(tl.minimum(end - begin, C), 1).to(tl.float32)
    moment = tl.zeros([BK, BK], tl.float32)
    y = tl.zeros([BK], tl.float32)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        x = load_tile(k, start, end, stride, 0, K, C, BK).to(tl.float32) * load_numbers(ks, start, end, H, h, 1.0, C)[:, None]
        x = tl.where(valid[:, None], x - b[None, :], 0.0).to(DOT)
        store_tile(x_out, x, start, end, H * K, 0, K, C, BK)
        tl.store(sums + (start - begin) // C * (H * K) + i, y, mask=i < K)
        y += tl.sum(x.to(tl.float32), 0)
        moment += tl.dot(tl.trans(x), x, input_precision=PRECISION)
    w = tl.maximum(end - begin, 0).to(tl.float32)
    mu = y / tl.maximum(w, 1.0)
    store_memory(covariance + place * K * K, moment - y[:, None] * mu[None, :], 0, K, K, BK, BK)
    tl.store(point + place * K + i, b, mask=i < K)
    tl.store(mean + place * K + i, b + mu, mask=i < K)
    tl.store(weight + place, w)


@triton.jit
def merge_kernel(
    covariance, mean, weight, point, state_c, state_mu, state_w, second_before, mean_before, weight_before, final_c, final_mu, final_w,
    first, T, L, H, K, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From each segment's own moments, those of all before it (R, μ, w) and the row's last (C, μ, w); a program has BK rows of them."""
    r = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(r, first, T, L)
    i = tl.program_id(1) * BK + tl.arange(0, BK)
    j = tl.arange(0, BV)
    place = i[:, None] * K + j[None, :]
    mask = (i < K)[:, None] & (j < K)[None, :]
    row = r.to(tl.int64) * H + h
    if state_c is None:
        moment = tl.zeros([BK, BV], tl.float32)
        mu_i = tl.zeros([BK], tl.float32)
        mu_j = tl.zeros([BV], tl.float32)
        w = tl.sum(mu_j, 0)
    else:
        moment = tl.load(state_c + row * K * K + place, mask=mask, other=0.0)
        mu_i = tl.load(state_mu + row * K + i, mask=i < K, other=0.0)
        mu_j = tl.load(state_mu + row * K + j, mask=j < K, other=0.0)
        w = tl.load(state_w + row)
    for n in tl.range(count, num_stages=4):
        s = (begin + n) * H + h
        own = tl.load(covariance + s * K * K + place, mask=mask, other=0.0)
        own_i = tl.load(mean + s * K + i, mask=i < K, other=0.0)
        own_j = tl.load(mean + s * K + j, mask=j < K, other=0.0)
        own_w = tl.load(weight + s)
        m_i = tl.where(w > 0, mu_i - tl.load(point + s * K + i, mask=i < K, other=0.0), 0.0)
        m_j = tl.where(w > 0, mu_j - tl.load(point + s * K + j, mask=j < K, other=0.0), 0.0)
        R = moment + (w * m_i)[:, None] * m_j[None, :]
        tl.store(second_before + s * K * K + place, R.to(second_before.dtype.element_ty), mask=mask)
        tl.store(mean_before + s * K + i, mu_i, mask=i < K)
        if tl.program_id(1) == 0:
            tl.store(weight_before + s, w)
        share = own_w / tl.maximum(w + own_w, 1.0)
        moment += own + (w * share) * ((own_i - mu_i)[:, None] * (own_j - mu_j)[None, :])
        mu_i += share * (own_i - mu_i)
        mu_j += share * (own_j - mu_j)
        w += own_w
    tl.store(final_c + row * K * K + place, moment, mask=mask)
    tl.store(final_mu + row * K + i, mu_i, mask=i < K)
    if tl.program_id(1) == 0:
        tl.store(final_w + row, w)


@triton.jit
def past(x, C: tl.constexpr):
    """``x[t, j]`` for j ≤ t, else 0."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], x, 0.0)


@triton.jit
def load_block(base, start, stride, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """C tokens that are all there: no mask by row."""
    r = tl.arange(0, C)
    c = tl.arange(0, BK)
    place = base + start * stride + r[:, None] * stride + c[None, :]
    if K == BK:
        return tl.load(place)
    else:
        return tl.load(place, mask=(c < K)[None, :], other=0.0)


@triton.jit
def load_line(base, start, end, C: tl.constexpr):
    """Numbers of C tokens of one head, from ``[H, tokens]``: side by side, as a tile that wants them along its columns needs."""
    r = tl.arange(0, C)
    return tl.load(base + start + r, mask=start + r < end, other=0.0)


@triton.jit
def store_line(base, x, start, end, C: tl.constexpr):
    r = tl.arange(0, C)
    tl.store(base + start + r, x, mask=start + r < end)


@triton.jit
def read_kernel(
    q, lam, x_in, sums, point, second, mean, weight, other, out, rho_out, dlam, strength,
    table, T, L, H, tokens, q_stride, other_stride,
    K: tl.constexpr, C: tl.constexpr, CS: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q − (λ/w)·C q of a block of queries, and ρ; with ``other``, as the backward needs, also −otherᵀ C q / w and λ/w."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H % (L // C)
    s = tl.program_id(0) // H // (L // C)
    _, begin, end, _ = segment_of(s, table, T, L)
    start = begin + n * C
    if start >= end:
        return
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    q += h * K
    x_in += h * K
    w = tl.load(weight + place)
    m = tl.load(mean + place * K + i, mask=i < K, other=0.0) - tl.load(point + place * K + i, mask=i < K, other=0.0)
    y = tl.load(sums + ((s.to(tl.int64) * (L // CS) + n * (C // CS)) * H + h) * K + i, mask=i < K, other=0.0)
    y += tl.where(w > 0, w * m, 0.0)
    part = 1.0 / (w + (n * C + 1).to(tl.float32) + tl.arange(0, C))
    query = load_tile(q, start, end, q_stride, 0, K, C, BK)
    along = tl.sum(query.to(tl.float32) * y[None, :], 1)
    query = query.to(DOT)
    read = tl.zeros([C, BK], tl.float32)
    for earlier in tl.range(begin, start, C, num_stages=STAGES):
        x = load_block(x_in, earlier, H * K, K, C, BK)
        scores = tl.dot(query, tl.trans(x), input_precision=PRECISION)
        read += tl.dot(scores.to(DOT), x, input_precision=PRECISION)
    x = load_tile(x_in, start, end, H * K, 0, K, C, BK)
    scores = tl.dot(query, tl.trans(x), input_precision=PRECISION)
    rho = (along + tl.sum(past(scores, C), 1)) * part
    read += tl.dot(past(scores - rho[:, None], C).to(DOT), x, input_precision=PRECISION) - rho[:, None] * y[None, :]
    read += tl.dot(query, load_memory(second + place * K * K, 0, K, K, BK, BK), input_precision=PRECISION)
    factor = load_numbers(lam, start, end, H, h, 0.0, C) * part
    line = h.to(tl.int64) * tokens
    store_line(rho_out + line, rho, start, end, C)
    if other is not None:
        z = load_tile(other + h * K, start, end, other_stride, 0, K, C, BK).to(tl.float32)
        store_numbers(dlam, -tl.sum(z * read, 1) * part, start, end, H, h, C)
        store_line(strength + line, factor, start, end, C)
    z = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
    store_tile(out + h * K, z - factor[:, None] * read, start, end, H * K, 0, K, C, BK)


@compiled_together
def forward(q, k, lam, ks, state, cut: Segments, tiles: Tiles) -> tuple[Tensor, ...]:
    """q', the final C, μ, w; R, μ, w before each segment, ρ, and the `Keys`. T ≥ 1."""
    keys, before, final = moments(k, ks, state, k.shape[1], cut, tiles.moment)
    out, rho, _, _ = read(q, lam, keys, before, k.shape[1], cut, tiles.read)
    return out, *final, *before, rho, *keys


def room(count: int, k: Tensor, dtype: torch.dtype = torch.float32) -> Moments:
    H, K = k.shape[2:]
    second, mean, weight = (torch.empty(count, H, *shape, dtype=torch.float32, device=k.device) for shape in ((0, 0), (K,), ()))
    return Moments(second.new_empty(count, H, K, K, dtype=dtype), mean, weight)


def moments(k, ks, state, T: int, cut: Segments, shape: Shape) -> tuple[Keys, Moments, Moments]:
    """The keys as the kernels read them, what comes before each segment, and the final state of each row."""
    B, _, H, K = k.shape
    DOT, precision = dot_type(k.dtype)
    kind = operand(k.dtype)[0]
    own, before, final = room(cut.number, k), room(cut.number, k, kind), room(cut.rows, k)
    keys = Keys(
        torch.empty(B, T, H, K, dtype=kind, device=k.device),
        own.mean.new_empty(cut.number, cut.length // shape.chunk, H, K),
        torch.empty_like(own.mean),
    )
    launch(
        moment_kernel, (cut.number * H,),
        k, ks, *keys, *own, cut.table, T, cut.length, H, k.stride(1), K=K,
        C=shape.chunk, BK=padded(K), DOT=DOT, PRECISION=precision, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    rows, width = 512 // padded(K), padded(K)
    launch(
        merge_kernel, (cut.rows * H, triton.cdiv(K, rows)),
        *own, keys.point, *(state or (None, None, None)), *before, *final,
        cut.first, T, cut.length, H, K, BK=rows, BV=width, num_warps=4,
    )  # fmt: skip
    return keys, before, final


def read(
    q, lam, keys: Keys, before: Moments, T: int, cut: Segments, shape: Shape, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """q − (λ/w)·C q in q's dtype and ρ ``[H, B·T]``; with ``other`` also −otherᵀ C q / w ``[B, T, H]`` and λ/w ``[H, B·T]``, else None."""
    H, K = q.shape[2:]
    tokens = lam.numel() // H
    out, rho = torch.empty(q.shape, dtype=q.dtype, device=q.device), lam.new_empty(H, tokens)
    dlam, strength = (None, None) if other is None else (torch.empty_like(lam), torch.empty_like(rho))
    DOT, precision = dot_type(keys.x.dtype)
    launch(
        read_kernel, (cut.number * (cut.length // shape.chunk) * H,),
        q, lam, *keys, *before, other, out, rho, dlam, strength,
        cut.table, T, cut.length, H, tokens, q.stride(1), 0 if other is None else other.stride(1), K=K,
        C=shape.chunk, CS=cut.length // keys.sums.shape[1], BK=padded(K),
        DOT=DOT, PRECISION=precision, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip
    return out, rho, dlam, strength
