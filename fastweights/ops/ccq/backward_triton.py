"""CCQ's backward kernels. With e = dq' and s_t = λ_t/w_t:

    dq_t = e_t − s_t·C_t e_t        (C is symmetric: the same read, of e)        dλ_t = −q_tᵀ C_t e_t / w_t
    dk_j = Σ_{t≥j} −s_t·( e_t·q_tᵀ(k_j − μ_t) + q_t·e_tᵀ(k_j − μ_t) )

The second line is the whole gradient, the mean's share included: Σ_t weighs (k_j − μ_t)(k_j − μ_t)ᵀ, whose derivative by μ_t is zero. With
keys and means measured from one point b, x = k − b, ρ_t = q_tᵀ(μ_t − b), ε_t = e_tᵀ(μ_t − b), the sum over later segments is

    dk_j = P x_j − r,   P = Σ −s (q eᵀ + e qᵀ),   r = Σ −s (e ρ + q ε),   and for w:   κ = Σ −s (ρ ε + dλ)

and another point b − δ has r + P δ and κ + δᵀ r + ½ δᵀ P δ. `pair_kernel` takes each segment's own P, r, κ from the segment's point to the
document's, its last mean, where `suffix_kernel` adds up what comes after each segment and takes that back; `key_kernel` reads a block of
keys: P once, then the segment's queries from the block on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.ccq.forward_triton import Keys, Moments, Shape, Tiles, load_line, read
from fastweights.ops.decay.segments_triton import (
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
from fastweights.ops.tiles_triton import padded


class Pairs(NamedTuple):
    """P ``[segments or rows, H, K, K]``, r ``[…, H, K]`` and κ ``[…, H]``, float32."""

    P: Tensor
    r: Tensor
    kappa: Tensor


@triton.jit
def pair_kernel(
    q, e, point, base, strength, rho, eps, dlam, P, r, kappa, table, T, L, H, tokens, q_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment alone adds to P, r and κ before it."""
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    document, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    line = h.to(tl.int64) * tokens
    q += h * K
    e += h * K
    pairs = tl.zeros([BK, BK], tl.float32)
    r_rows = tl.zeros([C, BK], tl.float32)  # rows are added up once, at the end
    kappa_rows = tl.zeros([C], tl.float32)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        share = -load_line(strength + line, start, end, C)
        of_query = load_line(rho + line, start, end, C)
        of_grad = load_line(eps + line, start, end, C)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK).to(tl.float32) * share[:, None]
        pairs += tl.dot(tl.trans(query.to(DOT)), grad.to(DOT), input_precision=PRECISION)
        r_rows += grad * of_query[:, None] + query.to(tl.float32) * (share * of_grad)[:, None]
        kappa_rows += share * (of_query * of_grad + load_numbers(dlam, start, end, H, h, 0.0, C))
    pairs += tl.trans(pairs)
    delta = tl.load(point + place * K + i, mask=i < K, other=0.0)
    delta -= tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    r_sum = tl.sum(r_rows, 0)
    moved = tl.sum(pairs * delta[:, None], 0)
    store_memory(P + place * K * K, pairs, 0, K, K, BK, BK)
    tl.store(r + place * K + i, r_sum + moved, mask=i < K)
    tl.store(kappa + place, tl.sum(kappa_rows, 0) + tl.sum(delta * (r_sum + 0.5 * moved), 0))


@triton.jit
def suffix_kernel(
    P, r, kappa, point, base, dcovariance, dmean, dweight, final_weight, P_after, r_after, first_P, first_r, first_kappa,
    first, T, L, H, K, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From each segment's own P, r, κ, the sums over all after it, from the segment's point; and those over the row. BK rows a program."""
    row = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(row, first, T, L)
    i = tl.program_id(1) * BK + tl.arange(0, BK)
    j = tl.arange(0, BV)
    place = i[:, None] * K + j[None, :]
    mask = (i < K)[:, None] & (j < K)[None, :]
    at = tl.program_id(0).to(tl.int64)
    pairs = tl.zeros([BK, BV], tl.float32)
    r_sum = tl.zeros([BK], tl.float32)
    kappa_sum = tl.sum(r_sum, 0)
    if dcovariance is not None:
        turned = j[None, :] * K + i[:, None]
        pairs += tl.load(dcovariance + at * K * K + place, mask=mask, other=0.0)
        pairs += tl.load(dcovariance + at * K * K + turned, mask=mask, other=0.0)
    if dmean is not None:
        r_sum -= tl.load(dmean + at * K + i, mask=i < K, other=0.0) / tl.maximum(tl.load(final_weight + at), 1e-30)
    if dweight is not None:
        kappa_sum += tl.load(dweight + at)
    origin = tl.load(base + at * K + j, mask=j < K, other=0.0)
    for n in tl.range(count, num_stages=4):
        s = (begin + count - 1 - n) * H + h
        own = tl.load(P + s * K * K + place, mask=mask, other=0.0)
        own_r = tl.load(r + s * K + i, mask=i < K, other=0.0)
        own_kappa = tl.load(kappa + s)
        delta = tl.load(point + s * K + j, mask=j < K, other=0.0) - origin
        tl.store(P_after + s * K * K + place, pairs.to(P_after.dtype.element_ty), mask=mask)
        tl.store(r_after + s * K + i, r_sum - tl.sum(pairs * delta[None, :], 1), mask=i < K)
        pairs += own
        r_sum += own_r
        kappa_sum += own_kappa
    tl.store(first_P + at * K * K + place, pairs, mask=mask)
    tl.store(first_r + at * K + i, r_sum, mask=i < K)
    if tl.program_id(1) == 0:
        tl.store(first_kappa + at, kappa_sum)


@triton.jit
def key_kernel(
    q, x_in, k, ks, e, strength, rho, eps, P, r, dk, dks, table, T, L, H, tokens, q_stride, k_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk of a block of keys, and with it dks."""
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H % (L // C)
    s = tl.program_id(0) // H // (L // C)
    _, begin, end, _ = segment_of(s, table, T, L)
    start = begin + n * C
    if start >= end:
        return
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    t = tl.arange(0, C)
    line = h.to(tl.int64) * tokens
    q += h * K
    e += h * K
    x = load_tile(x_in + h * K, start, end, H * K, 0, K, C, BK)
    found = tl.zeros([C, BK], tl.float32)
    for later in tl.range(start, end, C, num_stages=STAGES):
        seen = (later - start + t)[None, :] >= t[:, None]  # of the block itself, a key's own query and those after it
        share = tl.where(seen, -load_line(strength + line, later, end, C)[None, :], 0.0)
        query = load_tile(q, later, end, q_stride, 0, K, C, BK).to(DOT)
        grad = load_tile(e, later, end, H * K, 0, K, C, BK).to(DOT)
        scores = tl.dot(x, tl.trans(query), input_precision=PRECISION) - load_line(rho + line, later, end, C)[None, :]
        found += tl.dot((scores * share).to(DOT), grad, input_precision=PRECISION)
        scores = tl.dot(x, tl.trans(grad), input_precision=PRECISION) - load_line(eps + line, later, end, C)[None, :]
        found += tl.dot((scores * share).to(DOT), query, input_precision=PRECISION)
    found += tl.dot(x, load_memory(P + place * K * K, 0, K, K, BK, BK), input_precision=PRECISION)
    found -= tl.load(r + place * K + i, mask=i < K, other=0.0)[None, :]
    if dks is not None:
        raw = load_tile(k + h * K, start, end, k_stride, 0, K, C, BK).to(tl.float32)
        store_numbers(dks, tl.sum(raw * found, 1), start, end, H, h, C)
        found *= load_numbers(ks, start, end, H, h, 1.0, C)[:, None]
    store_tile(dk + h * K, found, start, end, H * K, 0, K, C, BK)


@compiled_together
def backward(q, k, lam, ks, e, rho, dstate, keys: Keys, before: Moments, final: Moments, T: int, cut: Segments, tiles: Tiles):
    """Gradients of q, k, lam, key_scale (None if not given), and P, r, κ of the whole of each row."""
    H, K = k.shape[2:]
    dq, eps, dlam, strength = read(e, lam, keys, before, T, cut, tiles.read, other=q)
    own, row = (Pairs(*(x.new_empty(x.shape, dtype=torch.float32) for x in y)) for y in (before, final))
    after, r_after = torch.empty_like(before.second), torch.empty_like(before.mean)
    DOT, precision = dot_type(keys.x.dtype)
    sizes = (cut.table, T, cut.length, H, lam.numel() // H)

    def constants(shape: Shape) -> dict[str, object]:
        return dict(K=K, C=shape.chunk, BK=padded(K), DOT=DOT, PRECISION=precision, STAGES=shape.stages, num_warps=shape.warps)

    launch(
        pair_kernel, (cut.number * H,),
        q, e, keys.point, final.mean, strength, rho, eps, dlam, *own, *sizes, q.stride(1), **constants(tiles.pair),
    )  # fmt: skip
    rows, width = 512 // padded(K), padded(K)
    launch(
        suffix_kernel, (cut.rows * H, triton.cdiv(K, rows)),
        *own, keys.point, final.mean, *dstate, final.weight, after, r_after, *row, cut.first, T, cut.length, H, K,
        BK=rows, BV=width, num_warps=4,
    )  # fmt: skip
    dk, dks = torch.empty(k.shape, dtype=k.dtype, device=k.device), None if ks is None else torch.empty_like(ks)
    launch(
        key_kernel, (cut.number * (cut.length // tiles.key.chunk) * H,),
        q, keys.x, k, ks, e, strength, rho, eps, after, r_after, dk, dks, *sizes, q.stride(1), k.stride(1), **constants(tiles.key),
    )  # fmt: skip
    return dq, dk, dlam, dks, row
