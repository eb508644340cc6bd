"""CCQ's forward kernels: q' = q − (λ/w)·C q, with C the centred second moment of the keys so far.

Three launches, two reads of the keys, one of the queries. `moment_kernel` gives each segment's own (C, μ, w); `merge_kernel` puts together
what comes before each segment by Chan's formula; `read_kernel` walks through a segment and reads. Both keep C a sum of squares:

    merge   C' = a·C + C₂ + (a·w·w₂ / w')·δ δᵀ,   μ' = μ + (w₂ / w')·δ,   w' = a·w + w₂,   δ = μ₂ − μ
    token   d_t = k_t − μ_{t-1},   C_t = a_t C_{t-1} + c_t d_t d_tᵀ,   c_t = (w_t − 1) / w_t   (as a_t w_{t-1} = w_t − 1)

Inside a chunk x = k − μ, with μ the mean before it, is of the size of the keys' spread, so nothing is lost in half precision where keys crowd;
d is x less one triangular product. One program holds all of C, so K is at most 128.
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
    load_memory,
    load_numbers,
    load_tile,
    segment_of,
    segments_of_row,
    store_memory,
    store_tile,
)
from fastweights.ops.tiles_triton import operand, padded, triton_type


class Moments(NamedTuple):
    """Moments of every segment (its own, or of all before it): C ``[segments, H, K, K]``, μ ``[segments, H, K]``, w ``[segments, H]``."""

    covariance: Tensor
    mean: Tensor
    weight: Tensor


@triton.jit
def load_keys(k, ks, start, end, stride, H, h, K, C: tl.constexpr, BK: tl.constexpr):
    return load_tile(k, start, end, stride, 0, K, C, BK).to(tl.float32) * load_numbers(ks, start, end, H, h, 1.0, C)[:, None]


@triton.jit
def centred(k, base, valid):
    """Keys less ``base``, zero where there is no token."""
    return tl.where(valid[:, None], k - base[None, :], 0.0)


@triton.jit
def weights(g, w, C: tl.constexpr, DECAY: tl.constexpr):
    """A chunk's decays from their logs g ``[C]`` and the weight w before it.

    Returns the decay since the chunk's start of each token, that from each token to the end, the total, the weight w_t after each token, and
    the matrix ``exp(G_{t-1} − G_j)``, j < t, whose rows over w_{t-1} make the mean before each token.
    """
    i = tl.arange(0, C)
    if DECAY:
        a = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        before = tl.exp(tl.where(i[:, None] > i[None, :], (a - g)[:, None] - a[None, :], -float("inf")))
        w_before = tl.exp(a - g) * w + tl.sum(before, 1)
        return a, tl.exp(total - a), tl.exp(total), w_before, before
    else:
        return g, tl.full([C], 1.0, tl.float32), 1.0, w + i.to(tl.float32), tl.where(i[:, None] > i[None, :], 1.0, 0.0)


@triton.jit
def moment_kernel(
    k, g, ks, covariance, mean, weight, total, table, T, L, H, K, stride,
    C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each segment's own moments. A chunk is centred on its own mean, then merged."""
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    _, begin, end, _ = segment_of(s, table, T, L)
    k += h * K
    i = tl.arange(0, BK)
    moment = tl.zeros([BK, BK], tl.float32)
    mu = tl.zeros([BK], tl.float32)
    w = tl.sum(tl.zeros([C], tl.float32), 0)
    passed = w
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        x = load_keys(k, ks, start, end, stride, H, h, K, C, BK)
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        all_a = tl.sum(log_a, 0)
        u = tl.where(valid, tl.exp(all_a - tl.cumsum(log_a, 0)), 0.0) if DECAY else tl.where(valid, 1.0, 0.0)
        own_w = tl.sum(u, 0)
        own_mu = tl.sum(x * u[:, None], 0) / own_w
        x = centred(x, own_mu, valid)
        kept = tl.exp(all_a) * w
        share = own_w / (kept + own_w)
        delta = own_mu - mu
        moment = moment * tl.exp(all_a) + (kept * share) * (delta[:, None] * delta[None, :])
        moment += tl.dot(tl.trans((x * u[:, None]).to(DOT)), x.to(DOT), input_precision=PRECISION)
        mu += share * delta
        w = kept + own_w
        passed += all_a
    base = s.to(tl.int64) * H + h
    store_memory(covariance + base * K * K, moment, 0, K, K, BK, BK)
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
def load_moments(covariance, mean, weight, k, ks, s, begin, end, stride, H, h, K, BK: tl.constexpr):
    """What comes before segment s. Where nothing does, the mean is the first key: any point will do, one among the keys is best."""
    i = tl.arange(0, BK)
    base = s.to(tl.int64) * H + h
    moment = load_memory(covariance + base * K * K, 0, K, K, BK, BK)
    w = tl.load(weight + base)
    mu = tl.load(mean + base * K + i, mask=i < K, other=0.0)
    token = tl.where(begin < end, begin, 0)
    key = tl.load(k + token * stride + i, mask=i < K, other=0.0).to(tl.float32)
    if ks is not None:
        key *= tl.load(ks + token * H + h)
    return moment, tl.where(w > 0, mu, key), w


@triton.jit
def deviations(x, w_before, before, valid, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """d_t = k_t − μ_{t-1} from x = k − μ."""
    mean = tl.dot(before.to(DOT), x.to(DOT), input_precision=PRECISION) / tl.maximum(w_before, 1e-30)[:, None]
    return tl.where(valid[:, None], x - mean, 0.0)


@triton.jit
def read_kernel(
    q, k, lam, g, ks, covariance, mean, weight, out, table, T, L, H, K, q_stride, k_stride,
    C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    _, begin, end, _ = segment_of(s, table, T, L)
    q += h * K
    k += h * K
    out += h * K
    moment, mu, w = load_moments(covariance, mean, weight, k, ks, s, begin, end, k_stride, H, h, K, BK)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        x = centred(load_keys(k, ks, start, end, k_stride, H, h, K, C, BK), mu, valid)
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a, keep, carry, w_before, before = weights(log_a, w, C, DECAY)
        w_after = tl.exp(log_a) * w_before + 1.0
        c = 1.0 - 1.0 / w_after
        d = deviations(x, w_before, before, valid, DOT, PRECISION)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        P = tl.dot(query.to(DOT), tl.trans(d.to(DOT)), input_precision=PRECISION) * (decay_matrix(a, C) * c[None, :])
        read = tl.dot(query.to(DOT), moment.to(DOT), input_precision=PRECISION) * tl.exp(a)[:, None]
        read += tl.dot(P.to(DOT), d.to(DOT), input_precision=PRECISION)
        strength = load_numbers(lam, start, end, H, h, 0.0, C) / w_after
        store_tile(out, query.to(tl.float32) - strength[:, None] * read, start, end, H * K, 0, K, C, BK)
        moment = moment * carry + tl.dot(tl.trans((d * (c * keep)[:, None]).to(DOT)), d.to(DOT), input_precision=PRECISION)
        keep = tl.where(valid, keep, 0.0)
        w = carry * w + tl.sum(keep, 0)
        mu += tl.sum(x * keep[:, None], 0) / w


def moments(k, g, ks, state, T: int, cut: Segments, tile: Tile) -> tuple[Moments, Moments, Tensor]:
    """What comes before each segment, the final state of each row, and each segment's total log decay."""
    H, K = k.shape[2:]

    def room(count: int) -> Moments:
        return Moments(*(torch.empty(count, H, *shape, dtype=torch.float32, device=k.device) for shape in ((K, K), (K,), ())))

    own, final, BK = room(cut.count), room(cut.rows), padded(K)
    total, mean, weight = torch.empty_like(own.weight), torch.empty_like(own.mean), torch.empty_like(own.weight)
    DOT, precision = operand(k.dtype)
    moment_kernel[(cut.count * H,)](
        k, g, ks, *own, total, cut.table, T, cut.length, H, K, k.stride(1),
        C=tile.chunk, BK=BK, DECAY=g is not None, DOT=triton_type(DOT), PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    rows = max(1, 512 // BK)
    merge_kernel[(cut.rows * H, triton.cdiv(K, rows), 1)](
        *own, total, *(state or (None, None, None)), mean, weight, *final, cut.first, T, cut.length, H, K, BK=rows, BV=BK, num_warps=4,
    )  # fmt: skip
    return Moments(own.covariance, mean, weight), final, total


def read(q, k, lam, g, ks, before: Moments, T: int, cut: Segments, tile: Tile) -> Tensor:
    """q' ``[B, T, H, K]``, in q's dtype."""
    H, K = k.shape[2:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    DOT, precision = operand(q.dtype, k.dtype)
    read_kernel[(cut.count * H,)](
        q, k, lam, g, ks, *before, out, cut.table, T, cut.length, H, K, q.stride(1), k.stride(1),
        C=tile.chunk, BK=padded(K), DECAY=g is not None, DOT=triton_type(DOT), PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
