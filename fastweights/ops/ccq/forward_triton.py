"""CCQ's forward kernels: q' = q − (λ/w)·C q, with C the centred second moment of the keys so far.

Three launches, two reads of the keys, one of the queries. `moment_kernel` gives each segment's own (C, μ, w); `merge_kernel` puts together
what comes before each segment by Chan's formula; `read_kernel` walks through a segment and reads. All keep C a sum of squares:

    merge   C' = a·C + C₂ + (a·w·w₂ / w')·δ δᵀ,   μ' = μ + (w₂ / w')·δ,   w' = a·w + w₂,   δ = μ₂ − μ
    token   d_t = k_t − μ_{t-1},   C_t = a_t C_{t-1} + c_t d_t d_tᵀ,   c_t = (w_t − 1) / w_t   (as a_t w_{t-1} = w_t − 1)

Inside a chunk x = k − μ, with μ the mean before it, is of the size of the keys' spread, so nothing is lost in half precision where keys
crowd; d is a triangular matrix times x. Each program holds some columns of C; the columns share no sum but Σ_κ q_κ (C e)_κ, left in parts.
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
    decay_matrix,
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
from fastweights.ops.tiles_triton import padded


class Moments(NamedTuple):
    """Moments of every segment (its own, or of all before it): C ``[segments, H, K, K]``, μ ``[segments, H, K]``, w ``[segments, H]``."""

    covariance: Tensor
    mean: Tensor
    weight: Tensor


@triton.jit
def centred(k, base, valid):
    """Keys less ``base``, zero where there is no token."""
    return tl.where(valid[:, None], k - base[None, :], 0.0)


@triton.jit
def weights(g, w, C: tl.constexpr, DECAY: tl.constexpr):
    """A chunk's decays from their logs g ``[C]``, and its weights from the weight w before it.

    Returns the running sum of log decays, the decay from each token to the end, the decay of the whole, w_t after each token, and the matrix
    that takes x = k − μ to d_t = k_t − μ_{t-1}: one on the diagonal, less each earlier token's part in the mean.
    """
    i = tl.arange(0, C)
    if DECAY:
        a = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        part = tl.exp(tl.where(i[:, None] > i[None, :], (a - g)[:, None] - a[None, :], -float("inf")))
        w_before = tl.exp(a - g) * w + tl.sum(part, 1)
        w_after = tl.exp(g) * w_before + 1.0
        keep = tl.exp(total - a)
        carry = tl.exp(total)
    else:
        a = g
        part = tl.where(i[:, None] > i[None, :], 1.0, 0.0)
        w_before = w + i.to(tl.float32)
        w_after = w_before + 1.0
        keep = tl.full([C], 1.0, tl.float32)
        carry = 1.0
    centring = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - part / tl.maximum(w_before, 1e-30)[:, None]
    return a, keep, carry, w_after, centring


@triton.jit
def load_keys(k, ks, start, end, stride, H, h, column, K, C: tl.constexpr, W: tl.constexpr):
    return load_tile(k, start, end, stride, column, K, C, W).to(tl.float32) * load_numbers(ks, start, end, H, h, 1.0, C)[:, None]


@triton.jit
def moment_kernel(
    k, g, ks, covariance, mean, weight, total, table, T, L, H, K, stride,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each segment's own moments. A chunk is centred on its own mean, then merged."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    k += h * K
    moment = tl.zeros([BK, BV], tl.float32)
    mu = tl.zeros([BK], tl.float32)
    mu_columns = tl.zeros([BV], tl.float32)
    w = tl.sum(mu, 0)
    passed = w
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        all_a = tl.sum(log_a, 0)
        u = tl.where(valid, tl.exp(all_a - tl.cumsum(log_a, 0)), 0.0) if DECAY else tl.where(valid, 1.0, 0.0)
        own_w = tl.sum(u, 0)
        kept = tl.exp(all_a) * w
        share = own_w / (kept + own_w)
        x = load_keys(k, ks, start, end, stride, H, h, 0, K, C, BK)
        own_mu = tl.sum(x * u[:, None], 0) / own_w
        x = centred(x, own_mu, valid)
        delta = own_mu - mu
        mu += share * delta
        if NB == 1:
            y = x
            delta_columns = delta
        else:
            y = load_keys(k, ks, start, end, stride, H, h, block * BV, K, C, BV)
            own_mu = tl.sum(y * u[:, None], 0) / own_w
            y = centred(y, own_mu, valid)
            delta_columns = own_mu - mu_columns
            mu_columns += share * delta_columns
        moment = moment * tl.exp(all_a) + (kept * share) * (delta[:, None] * delta_columns[None, :])
        moment += tl.dot(tl.trans(x.to(DOT)), (y * u[:, None]).to(DOT), input_precision=PRECISION)
        w = kept + own_w
        passed += all_a
    base = s.to(tl.int64) * H + h
    store_memory(covariance + base * K * K, moment, block * BV, K, K, BK, BV)
    if block == 0:
        i = tl.arange(0, BK)
        tl.store(mean + base * K + i, mu, mask=i < K)
        tl.store(weight + base, w)
        tl.store(total + base, passed)


@triton.jit
def merge_kernel(
    covariance, mean, weight, total, state_c, state_mu, state_w, mean_before, weight_before, final_c, final_mu, final_w,
    first, T, L, H, K, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Moments of each segment become those of all before it: C in place, μ and w in ``*_before``."""
    r = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(r, first, T, L)
    i = tl.program_id(1) * BK + tl.arange(0, BK)
    j = tl.program_id(2) * BV + tl.arange(0, BV)
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
        a = tl.exp(tl.load(total + s))
        tl.store(covariance + s * K * K + place, moment, mask=mask)
        if tl.program_id(2) == 0:
            tl.store(mean_before + s * K + i, mu_i, mask=i < K)
            tl.store(weight_before + s, w)
        kept = a * w
        share = own_w / (kept + own_w)
        moment = a * moment + own + (kept * share) * ((own_i - mu_i)[:, None] * (own_j - mu_j)[None, :])
        mu_i += share * (own_i - mu_i)
        mu_j += share * (own_j - mu_j)
        w = kept + own_w
    tl.store(final_c + row * K * K + place, moment, mask=mask)
    if tl.program_id(2) == 0:
        tl.store(final_mu + row * K + i, mu_i, mask=i < K)
        tl.store(final_w + row, w)


@triton.jit
def load_mean(mean, w, k, ks, place, begin, end, stride, H, h, column, K, W: tl.constexpr):
    """The mean before a segment. Where there is none, the first key: any point will do, and one among the keys is best."""
    i = column + tl.arange(0, W)
    mu = tl.load(mean + place * K + i, mask=i < K, other=0.0)
    token = tl.where(begin < end, begin, 0)
    key = tl.load(k + token * stride + i, mask=i < K, other=0.0).to(tl.float32)
    if ks is not None:
        key *= tl.load(ks + token * H + h)
    return tl.where(w > 0, mu, key)


@triton.jit
def read_kernel(
    q, k, lam, g, ks, covariance, mean, weight, base, other, out, against_mean, dlam, strength, table, T, L, H, K, tokens,
    q_stride, k_stride, other_stride,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q − (λ/w)·C q, and qᵀ(μ_t − base); with ``other``, as the backward needs, also −otherᵀ C q / w (in parts) and λ/w."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    document, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    q += h * K
    k += h * K
    out += h * K
    i = tl.arange(0, BK)
    point = tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    w = tl.load(weight + place)
    mu = load_mean(mean, w, k, ks, place, begin, end, k_stride, H, h, 0, K, BK)
    mu_columns = load_mean(mean, w, k, ks, place, begin, end, k_stride, H, h, column, K, BV)
    moment = load_memory(covariance + place * K * K, column, K, K, BK, BV)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        a, keep, carry, w_after, centring = weights(load_numbers(g, start, end, H, h, 0.0, C), w, C, DECAY)
        c = 1.0 - 1.0 / w_after
        share = tl.where(valid, keep, 0.0)
        w = carry * w + tl.sum(share, 0)
        centring = tl.where(valid[:, None], centring, 0.0).to(DOT)
        x = centred(load_keys(k, ks, start, end, k_stride, H, h, 0, K, C, BK), mu, valid)
        moved = tl.sum(x * share[:, None], 0) / w
        d = tl.dot(centring, x.to(DOT), input_precision=PRECISION).to(DOT)
        if NB == 1:
            d_columns = d
        else:
            x = centred(load_keys(k, ks, start, end, k_stride, H, h, column, K, C, BV), mu_columns, valid)
            mu_columns += tl.sum(x * share[:, None], 0) / w
            d_columns = tl.dot(centring, x.to(DOT), input_precision=PRECISION).to(DOT)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        scores = tl.dot(query.to(DOT), tl.trans(d), input_precision=PRECISION)
        A = decay_matrix(a, C)
        read = tl.dot(query.to(DOT), moment.to(DOT), input_precision=PRECISION) * tl.exp(a)[:, None]
        read += tl.dot((scores * (A * c[None, :])).to(DOT), d_columns, input_precision=PRECISION)
        factor = load_numbers(lam, start, end, H, h, 0.0, C) / w_after
        if block == 0:  # μ_t = μ + Σ_{j≤t} d_j / w_j
            j = tl.arange(0, C)
            along = tl.sum(tl.where(j[:, None] >= j[None, :], scores / w_after[None, :], 0.0), 1)
            along += tl.sum(query.to(tl.float32) * (mu - point)[None, :], 1)
            store_numbers(against_mean, along, start, end, H, h, C)
            if other is not None:
                store_numbers(strength, factor, start, end, H, h, C)
        if other is not None:
            y = load_tile(other + h * K, start, end, other_stride, column, K, C, BV).to(tl.float32)
            store_numbers(dlam + block.to(tl.int64) * tokens * H, -tl.sum(y * read, 1) / w_after, start, end, H, h, C)
        y = load_tile(q, start, end, q_stride, column, K, C, BV).to(tl.float32)
        store_tile(out, y - factor[:, None] * read, start, end, H * K, column, K, C, BV)
        weighted = (d_columns.to(tl.float32) * (c * keep)[:, None]).to(DOT)
        moment = moment * carry + tl.dot(tl.trans(d), weighted, input_precision=PRECISION)
        mu += moved


def columns(K: int, tile: Tile) -> dict[str, int]:
    """How K columns are shared out among programs."""
    BV = min(padded(K), tile.columns)
    return {"BK": padded(K), "BV": BV, "NB": triton.cdiv(K, BV)}


def moments(k, g, ks, state, T: int, cut: Segments, tile: Tile) -> tuple[Moments, Moments, Tensor]:
    """What comes before each segment, the final state of each row, and each segment's total log decay."""
    H, K = k.shape[2:]

    def room(count: int) -> Moments:
        return Moments(*(torch.empty(count, H, *shape, dtype=torch.float32, device=k.device) for shape in ((K, K), (K,), ())))

    own, final, shape = room(cut.count), room(cut.rows), columns(K, tile)
    total, mean, weight = torch.empty_like(own.weight), torch.empty_like(own.mean), torch.empty_like(own.weight)
    DOT, precision = dot_type(k.dtype)
    moment_kernel[(cut.count * H * shape["NB"],)](
        k, g, ks, *own, total, cut.table, T, cut.length, H, K, k.stride(1),
        C=tile.chunk, **shape, DECAY=g is not None, DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    rows, width = 512 // min(shape["BK"], 128), min(shape["BK"], 128)
    merge_kernel[(cut.rows * H, triton.cdiv(K, rows), triton.cdiv(K, width))](
        *own, total, *(state or (None, None, None)), mean, weight, *final, cut.first, T, cut.length, H, K, BK=rows, BV=width, num_warps=4,
    )  # fmt: skip
    return Moments(own.covariance, mean, weight), final, total


def read(
    q, k, lam, g, ks, before: Moments, base: Tensor, T: int, cut: Segments, tile: Tile, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """q − (λ/w)·C q in q's dtype and qᵀ(μ_t − base) ``[B, T, H]``; with ``other`` also −otherᵀ C q / w and λ/w, else None."""
    H, K = k.shape[2:]
    shape = columns(K, tile)
    out, against_mean = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lam)
    dlam = strength = None
    if other is not None:
        dlam, strength = lam.new_empty(shape["NB"], *lam.shape), torch.empty_like(lam)
    DOT, precision = dot_type(q.dtype, k.dtype)
    read_kernel[(cut.count * H * shape["NB"],)](
        q, k, lam, g, ks, *before, base, other, out, against_mean, dlam, strength,
        cut.table, T, cut.length, H, K, lam.numel() // H, q.stride(1), k.stride(1), 0 if other is None else other.stride(1),
        C=tile.chunk, **shape, DECAY=g is not None, DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, against_mean, None if dlam is None else dlam.sum(0), strength
