"""CCQ's forward kernels: q' = q − (λ/w)·C q, with C the centred second moment of the keys so far, all counted alike.

Three launches, one read of the keys. `moment_kernel` measures each segment's keys from a point b in their midst, the mean of the first
chunk, and leaves x = k − b, rounded as the tensor cores take it, the sum of x before each chunk, and the segment's own (C, μ, w).
`merge_kernel` puts together what comes before each segment by Chan's formula; `read_kernel` walks through a segment and reads. With
m = μ − b before the segment, and before a chunk y = w₀ m + Σ x, R = C₀ + w₀ m mᵀ + Σ x xᵀ:

    merge   C' = C + C₂ + (w·w₂ / w')·δ δᵀ,   μ' = μ + (w₂ / w')·δ,   w' = w + w₂,   δ = μ₂ − μ
    read    C_t q_t = R q_t − ρ_t y + Σ_{j≤t} (q_tᵀ x_j − ρ_t) x_j,   ρ_t = q_tᵀ(μ_t − b) = (q_tᵀ y + Σ_{j≤t} q_tᵀ x_j) / w_t

x is of the size of the keys' spread, so half precision loses nothing where keys crowd; all sums are of the rounded x, so that C stays a sum
of squares. Nothing depends on b but the rounding. Each program holds some columns of C; all sums over columns are left in parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.decay.segments_triton import (
    Segments,
    Tile,
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


class Moments(NamedTuple):
    """Moments of every segment (its own, or of all before it): C ``[segments, H, K, K]``, μ ``[segments, H, K]``, w ``[segments, H]``."""

    covariance: Tensor
    mean: Tensor
    weight: Tensor


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
    covariance, mean, weight, state_c, state_mu, state_w, mean_before, weight_before, final_c, final_mu, final_w,
    first, T, L, H, K, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Moments of each segment become those of all before it: C in place, μ and w in ``*_before``."""
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
        tl.store(covariance + s * K * K + place, moment, mask=mask)
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
def along(x, y, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """``x y`` for x ``[C, K]``, y ``[K]``, on the tensor cores: x stays in shared memory, and takes no registers."""
    many = tl.broadcast_to(y[:, None], [BK, 16])
    return tl.sum(tl.dot(x, many.to(DOT), input_precision=PRECISION), 1) * 0.0625


@triton.jit
def past(x, C: tl.constexpr):
    """``x[t, j]`` for j ≤ t, else 0."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], x, 0.0)


@triton.jit
def read_kernel(
    q, lam, x_in, sums, point, covariance, mean, weight, other, out, rho_out, dlam, strength,
    table, T, L, H, tokens, q_stride, other_stride,
    K: tl.constexpr, C: tl.constexpr, CS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q − (λ/w)·C q, and ρ; with ``other``, as the backward needs, also −otherᵀ C q / w (in parts) and λ/w."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    _, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    q += h * K
    x_in += h * K
    out += h * K
    sums += (s.to(tl.int64) * (L // CS) * H + h) * K
    w = tl.load(weight + place)
    m = tl.load(mean + place * K + i, mask=i < K, other=0.0) - tl.load(point + place * K + i, mask=i < K, other=0.0)
    m_columns = tl.load(mean + place * K + j, mask=j < K, other=0.0) - tl.load(point + place * K + j, mask=j < K, other=0.0)
    m = tl.where(w > 0, m, 0.0)
    m_columns = tl.where(w > 0, m_columns, 0.0)
    moment = load_memory(covariance + place * K * K, column, K, K, BK, BV) + (w * m)[:, None] * m_columns[None, :]
    for start in tl.range(begin, end, C, num_stages=STAGES):
        chunk = sums + (start - begin) // CS * (H * K)
        y = w * m + tl.load(chunk + i, mask=i < K, other=0.0)
        y_columns = w * m_columns + tl.load(chunk + j, mask=j < K, other=0.0)
        part = 1.0 / (w + (start - begin + 1).to(tl.float32) + tl.arange(0, C))
        x = load_tile(x_in, start, end, H * K, 0, K, C, BK)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK).to(DOT)
        x_columns = x if NB == 1 else load_tile(x_in, start, end, H * K, column, K, C, BV)
        scores = tl.dot(query, tl.trans(x), input_precision=PRECISION)
        rho = (along(query, y, BK, DOT, PRECISION) + tl.sum(past(scores, C), 1)) * part
        read = tl.dot(query, moment.to(DOT), input_precision=PRECISION) - rho[:, None] * y_columns[None, :]
        read += tl.dot(past(scores - rho[:, None], C).to(DOT), x_columns, input_precision=PRECISION)
        moment += tl.dot(tl.trans(x), x_columns, input_precision=PRECISION)
        factor = load_numbers(lam, start, end, H, h, 0.0, C) * part
        if block == 0:
            store_numbers(rho_out, rho, start, end, H, h, C)
            if other is not None:
                store_numbers(strength, factor, start, end, H, h, C)
        if other is not None:
            z = load_tile(other + h * K, start, end, other_stride, column, K, C, BV).to(tl.float32)
            store_numbers(dlam + block.to(tl.int64) * tokens * H, -tl.sum(z * read, 1) * part, start, end, H, h, C)
        z = load_tile(q, start, end, q_stride, column, K, C, BV).to(tl.float32)
        store_tile(out, z - factor[:, None] * read, start, end, H * K, column, K, C, BV)


def columns(K: int, tile: Tile) -> dict[str, int]:
    """How K columns are shared out among programs."""
    BV = min(padded(K), tile.columns)
    return {"BK": padded(K), "BV": BV, "NB": triton.cdiv(K, BV)}


@compiled_together
def forward(q, k, lam, ks, state, cut: Segments, walk: Tile, collect: Tile) -> tuple[Tensor, ...]:
    """q', the final C, μ, w; C, μ, w before each segment, ρ, and the `Keys`. T ≥ 1."""
    keys, before, final = moments(k, ks, state, k.shape[1], cut, collect)
    out, rho, _, _ = read(q, lam, keys, before, k.shape[1], cut, walk)
    return out, *final, *before, rho, *keys


def moments(k, ks, state, T: int, cut: Segments, tile: Tile) -> tuple[Keys, Moments, Moments]:
    """The keys as the kernels read them, what comes before each segment, and the final state of each row."""
    B, _, H, K = k.shape

    def room(count: int) -> Moments:
        return Moments(*(torch.empty(count, H, *shape, dtype=torch.float32, device=k.device) for shape in ((K, K), (K,), ())))

    own, final = room(cut.number), room(cut.rows)
    mean, weight = torch.zeros_like(own.mean), torch.zeros_like(own.weight)  # zeros stay where a segment holds no token
    DOT, precision = dot_type(k.dtype)
    keys = Keys(
        torch.empty(B, T, H, K, dtype=operand(k.dtype)[0], device=k.device),
        own.mean.new_empty(cut.number, cut.length // tile.chunk, H, K),
        torch.empty_like(own.mean),
    )
    launch(
        moment_kernel, (cut.number * H,),
        k, ks, *keys, *own, cut.table, T, cut.length, H, k.stride(1), K=K,
        C=tile.chunk, BK=padded(K), DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    rows, width = 512 // padded(K), padded(K)
    launch(
        merge_kernel, (cut.rows * H, triton.cdiv(K, rows)),
        *own, *(state or (None, None, None)), mean, weight, *final, cut.first, T, cut.length, H, K, BK=rows, BV=width, num_warps=4,
    )  # fmt: skip
    return keys, Moments(own.covariance, mean, weight), final


def read(
    q, lam, keys: Keys, before: Moments, T: int, cut: Segments, tile: Tile, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """q − (λ/w)·C q in q's dtype and ρ ``[B, T, H]``; with ``other`` also −otherᵀ C q / w and λ/w, else None."""
    H, K = q.shape[2:]
    shape = columns(K, tile)
    out, rho = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lam)
    dlam = strength = None
    if other is not None:
        dlam, strength = lam.new_empty(shape["NB"], *lam.shape), torch.empty_like(lam)
    DOT, precision = dot_type(keys.x.dtype)
    launch(
        read_kernel, (cut.number * H * shape["NB"],),
        q, lam, *keys, *before, other, out, rho, dlam, strength,
        cut.table, T, cut.length, H, lam.numel() // H, q.stride(1), 0 if other is None else other.stride(1), K=K,
        C=tile.chunk, CS=cut.length // keys.sums.shape[1], **shape,
        DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, rho, None if dlam is None else dlam.sum(0), strength
