"""CCQ's forward kernels: q' = q − (λ/w)·C q, with C the centred second moment of the keys so far.

Three launches, two reads of the keys, one of the queries. `moment_kernel` gives each segment's own (C, μ, w); `merge_kernel` puts together
what comes before each segment by Chan's formula; `read_kernel` walks through a segment and reads. Inside a segment everything is measured
from one point b among the keys before it (their mean, or the first key): x = k − b, y = Σ A x, R = Σ A x xᵀ over the tokens before a chunk,
g its running sum of log decays, A[t, j] = exp(g_t − g_j):

    merge   C' = a·C + C₂ + (a·w·w₂ / w')·δ δᵀ,   μ' = μ + (w₂ / w')·δ,   w' = a·w + w₂,   δ = μ₂ − μ
    read    C_t q_t = exp(g_t)·(R q_t − ρ_t y) + Σ_{j≤t} A[t, j] (q_tᵀ x_j − ρ_t) x_j
            ρ_t = q_tᵀ(μ_t − b) = (exp(g_t)·q_tᵀ y + Σ_{j≤t} A[t, j] q_tᵀ x_j) / w_t

x is of the size of the keys' spread, so half precision loses nothing where keys crowd; it is rounded once, and y and R are sums of the
rounded x, so that C stays a sum of squares. Each program holds some columns of C; all sums over columns are left in parts.
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
def chunk_weights(g, w, valid, DECAY: tl.constexpr):
    """From a chunk's log decays ``[C]`` and the weight w before it: their running sum, the decay from each token to the end (0 where there
    is no token), the decay of the whole, and the weight after it."""
    keep = tl.where(valid, 1.0, 0.0)
    carry = 1.0
    if DECAY:
        keep *= tl.exp(tl.sum(g, 0) - tl.cumsum(g, 0))
        carry = tl.exp(tl.sum(g, 0))
    return tl.cumsum(g, 0) if DECAY else g, keep, carry, carry * w + tl.sum(keep, 0)


@triton.jit
def decayed(x, a, C: tl.constexpr, DECAY: tl.constexpr):
    """``A[t, j]·x[t, j]``, from the running sum a of log decays."""
    i = tl.arange(0, C)
    return x * decay_matrix(a, C) if DECAY else tl.where(i[:, None] >= i[None, :], x, 0.0)


@triton.jit
def along(x, y, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """``x y`` for x ``[C, K]``, y ``[K]``, on the tensor cores: x stays in shared memory, and takes no registers."""
    many = tl.broadcast_to(y[:, None], [BK, 16])
    return tl.sum(tl.dot(x.to(DOT), many.to(DOT), input_precision=PRECISION), 1) * 0.0625


@triton.jit
def summed(x, keep, C: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """``Σ_j keep_j x_j``; where keep is all ones on the tensor cores, which are exact then."""
    if DECAY:
        return tl.sum(x.to(tl.float32) * keep[:, None], 0)
    else:
        return tl.sum(tl.dot(tl.trans(x), tl.full([C, 16], 1.0, DOT), input_precision=PRECISION), 1) * 0.0625


@triton.jit
def load_keys(k, ks, start, end, stride, H, h, column, K, C: tl.constexpr, W: tl.constexpr):
    return load_tile(k, start, end, stride, column, K, C, W).to(tl.float32) * load_numbers(ks, start, end, H, h, 1.0, C)[:, None]


@triton.jit
def load_mean(mean, w, k, ks, place, begin, end, stride, H, h, column, K, W: tl.constexpr):
    """The mean before a segment. Where there is none, the first key: any point will do, and one among the keys is best."""
    i = column + tl.arange(0, W)
    mu = tl.load(mean + place * K + i, mask=i < K, other=0.0) if mean is not None else tl.zeros([W], tl.float32)
    token = tl.where(begin < end, begin, 0)
    key = tl.load(k + token * stride + i, mask=i < K, other=0.0).to(tl.float32)
    if ks is not None:
        key *= tl.load(ks + token * H + h)
    return tl.where(w > 0, mu, key)


@triton.jit
def moment_kernel(
    k, g, ks, covariance, mean, weight, total, table, T, L, H, stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each segment's own moments."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    k += h * K
    moment = tl.zeros([BK, BV], tl.float32)
    w = tl.sum(tl.zeros([C], tl.float32), 0)
    passed = w
    point = load_mean(None, w, k, ks, 0, begin, end, stride, H, h, 0, K, BK)
    point_columns = load_mean(None, w, k, ks, 0, begin, end, stride, H, h, block * BV, K, BV)
    sums = tl.zeros([C, BK], tl.float32)  # rows are added up once, at the end
    sums_columns = tl.zeros([C, BV], tl.float32)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a, keep, carry, w = chunk_weights(log_a, w, valid, DECAY)
        passed += tl.sum(log_a, 0)
        x = (load_keys(k, ks, start, end, stride, H, h, 0, K, C, BK) - point[None, :]).to(DOT)
        weighted = x.to(tl.float32) * keep[:, None]
        sums = sums * carry + weighted
        if NB > 1:
            weighted = load_keys(k, ks, start, end, stride, H, h, block * BV, K, C, BV) - point_columns[None, :]
            weighted = weighted.to(DOT).to(tl.float32) * keep[:, None]
            sums_columns = sums_columns * carry + weighted
        moment = moment * carry + tl.dot(tl.trans(x), weighted.to(DOT), input_precision=PRECISION)
    y = tl.sum(sums, 0)
    y_columns = y if NB == 1 else tl.sum(sums_columns, 0)
    over = 1.0 / tl.maximum(w, 1e-30)
    moment -= (y * over)[:, None] * y_columns[None, :]
    mu = point + y * over
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
def read_kernel(
    q, k, lam, g, ks, covariance, mean, weight, other, out, rho_out, dlam, strength, table, T, L, H, tokens,
    q_stride, k_stride, other_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q − (λ/w)·C q, and ρ; with ``other``, as the backward needs, also −otherᵀ C q / w (in parts) and λ/w."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    _, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    q += h * K
    k += h * K
    out += h * K
    w = tl.load(weight + place)
    point = load_mean(mean, w, k, ks, place, begin, end, k_stride, H, h, 0, K, BK)
    point_columns = load_mean(mean, w, k, ks, place, begin, end, k_stride, H, h, column, K, BV)
    moment = load_memory(covariance + place * K * K, column, K, K, BK, BV)
    y = tl.zeros([BK], tl.float32)
    y_columns = tl.zeros([BV], tl.float32)
    # The last chunk may reach past the end: what it leaves in moment, y and w is not used, and its rows are not stored.
    for start in tl.range(begin, end, C, num_stages=STAGES):
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a = tl.cumsum(log_a, 0) if DECAY else log_a
        part = 1.0 / (tl.exp(a) * w + tl.sum(decay_matrix(a, C), 1) if DECAY else w + 1.0 + tl.arange(0, C))
        keep = tl.exp(tl.sum(log_a, 0) - a) if DECAY else tl.full([C], 1.0, tl.float32)
        carry = tl.exp(tl.sum(log_a, 0)) if DECAY else 1.0
        x = (load_keys(k, ks, start, end, k_stride, H, h, 0, K, C, BK) - point[None, :]).to(DOT)
        added = summed(x, keep, C, DECAY, DOT, PRECISION)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        scores = tl.dot(query.to(DOT), tl.trans(x), input_precision=PRECISION)
        rho = along(query, y, BK, DOT, PRECISION)
        if DECAY:
            rho *= tl.exp(a)
        rho = (rho + tl.sum(decayed(scores, a, C, DECAY), 1)) * part
        read = tl.dot(query.to(DOT), moment.to(DOT), input_precision=PRECISION) - rho[:, None] * y_columns[None, :]
        if DECAY:
            read *= tl.exp(a)[:, None]
        y = y * carry + added
        if NB == 1:
            x_columns = x
            y_columns = y
        else:
            x_columns = (load_keys(k, ks, start, end, k_stride, H, h, column, K, C, BV) - point_columns[None, :]).to(DOT)
            y_columns = y_columns * carry + tl.sum(x_columns.to(tl.float32) * keep[:, None], 0)
        read += tl.dot(decayed(scores - rho[:, None], a, C, DECAY).to(DOT), x_columns, input_precision=PRECISION)
        factor = load_numbers(lam, start, end, H, h, 0.0, C) * part
        if block == 0:
            store_numbers(rho_out, rho, start, end, H, h, C)
            if other is not None:
                store_numbers(strength, factor, start, end, H, h, C)
        if other is not None:
            z = load_tile(other + h * K, start, end, other_stride, column, K, C, BV).to(tl.float32)
            store_numbers(dlam + block.to(tl.int64) * tokens * H, -tl.sum(z * read, 1) * part, start, end, H, h, C)
        z = (query if NB == 1 else load_tile(q, start, end, q_stride, column, K, C, BV)).to(tl.float32)
        store_tile(out, z - factor[:, None] * read, start, end, H * K, column, K, C, BV)
        if DECAY:
            x_columns = (x_columns.to(tl.float32) * keep[:, None]).to(DOT)
        moment = moment * carry + tl.dot(tl.trans(x), x_columns, input_precision=PRECISION)
        w = w * carry + tl.sum(keep, 0)


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
        k, g, ks, *own, total, cut.table, T, cut.length, H, k.stride(1), K=K,
        C=tile.chunk, **shape, DECAY=g is not None, DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    rows, width = 512 // min(shape["BK"], 128), min(shape["BK"], 128)
    merge_kernel[(cut.rows * H, triton.cdiv(K, rows), triton.cdiv(K, width))](
        *own, total, *(state or (None, None, None)), mean, weight, *final, cut.first, T, cut.length, H, K, BK=rows, BV=width, num_warps=4,
    )  # fmt: skip
    return Moments(own.covariance, mean, weight), final, total


def read(
    q, k, lam, g, ks, before: Moments, T: int, cut: Segments, tile: Tile, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """q − (λ/w)·C q in q's dtype and ρ ``[B, T, H]``; with ``other`` also −otherᵀ C q / w and λ/w, else None."""
    H, K = k.shape[2:]
    shape = columns(K, tile)
    out, rho = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lam)
    dlam = strength = None
    if other is not None:
        dlam, strength = lam.new_empty(shape["NB"], *lam.shape), torch.empty_like(lam)
    DOT, precision = dot_type(q.dtype, k.dtype)
    read_kernel[(cut.count * H * shape["NB"],)](
        q, k, lam, g, ks, *before, other, out, rho, dlam, strength,
        cut.table, T, cut.length, H, lam.numel() // H, q.stride(1), k.stride(1), 0 if other is None else other.stride(1),
        K=K, C=tile.chunk, **shape, DECAY=g is not None, DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, rho, None if dlam is None else dlam.sum(0), strength
