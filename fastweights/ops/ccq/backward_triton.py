"""CCQ's backward kernels. With e = dq' and s_t = λ_t/w_t:

    dq_t = e_t − s_t·C_t e_t        (C is symmetric: the same read, of e)        dλ_t = −q_tᵀ C_t e_t / w_t
    dk_j = Σ_{t≥j} −s_t·( e_t·q_tᵀ(k_j − μ_t) + q_t·e_tᵀ(k_j − μ_t) )

The second line is the whole gradient, the mean's share included: Σ_t weighs (k_j − μ_t)(k_j − μ_t)ᵀ, whose derivative by μ_t is zero. With
keys and means measured from one point b, x = k − b, ρ_t = q_tᵀ(μ_t − b), ε_t = e_tᵀ(μ_t − b), the sum over later chunks is

    dk_j = (N + Nᵀ) x_j − r,   N = Σ −s q eᵀ,   r = Σ −s (e ρ + q ε),   and for w:   κ = Σ −s (ρ ε + dλ)

and another point b − δ has r + (N + Nᵀ) δ and κ + δᵀ r + δᵀ N δ. `pair_kernel` takes each segment's own N, r, κ from the segment's point to
the document's, its last mean, where they can be added up; `key_kernel` takes the sums back, and walks backward through the segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastweights.ops.ccq.forward_triton import Keys, Moments, columns, past, read
from fastweights.ops.decay.chunk_forward_triton import scan
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
from fastweights.ops.tiles_triton import padded


@triton.jit
def pair_kernel(
    q, e, point, base, strength, rho, eps, dlam, N, r, kappa, table, T, L, H, q_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment alone adds to N, r and κ before it."""
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    document, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    i = tl.arange(0, BK)
    q += h * K
    e += h * K
    pairs = tl.zeros([BK, BK], tl.float32)
    r_rows = tl.zeros([C, BK], tl.float32)  # rows are added up once, at the end
    kappa_rows = tl.zeros([C], tl.float32)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        share = -load_numbers(strength, start, end, H, h, 0.0, C)
        of_query = load_numbers(rho, start, end, H, h, 0.0, C)
        of_grad = load_numbers(eps, start, end, H, h, 0.0, C)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK).to(tl.float32) * share[:, None]
        pairs += tl.dot(tl.trans(query.to(DOT)), grad.to(DOT), input_precision=PRECISION)
        r_rows += grad * of_query[:, None] + query.to(tl.float32) * (share * of_grad)[:, None]
        kappa_rows += share * (of_query * of_grad + load_numbers(dlam, start, end, H, h, 0.0, C))
    delta = tl.load(point + place * K + i, mask=i < K, other=0.0)
    delta -= tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    r_sum = tl.sum(r_rows, 0)
    by_row = tl.sum(pairs * delta[:, None], 0)
    by_column = tl.sum(pairs * delta[None, :], 1)
    store_memory(N + place * K * K, pairs, 0, K, K, BK, BK)
    tl.store(r + place * K + i, r_sum + by_row + by_column, mask=i < K)
    tl.store(kappa + place, tl.sum(kappa_rows, 0) + tl.sum(delta * r_sum, 0) + tl.sum(delta * by_row, 0))


@triton.jit
def vector_scan_kernel(r, kappa, final_r, final_kappa, first, T, L, H, K, BK: tl.constexpr):
    """Backward in place: each segment's share of r becomes their sum over all after it; ``final_*`` go in and come out."""
    row = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(row, first, T, L)
    i = tl.arange(0, BK)
    r_sum = tl.load(final_r + tl.program_id(0).to(tl.int64) * K + i, mask=i < K, other=0.0)
    kappa_sum = tl.load(final_kappa + tl.program_id(0))
    for n in tl.range(count, num_stages=4):
        s = (begin + count - 1 - n) * H + h
        own = tl.load(r + s * K + i, mask=i < K, other=0.0)
        tl.store(r + s * K + i, r_sum, mask=i < K)
        r_sum += own
        kappa_sum += tl.load(kappa + s)
    tl.store(final_r + tl.program_id(0).to(tl.int64) * K + i, r_sum, mask=i < K)
    tl.store(final_kappa + tl.program_id(0), kappa_sum)


@triton.jit
def load_both(N, column, K, BK: tl.constexpr, BV: tl.constexpr):
    """Columns of N + Nᵀ."""
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    transposed = tl.load(N + j[None, :] * K + i[:, None], mask=(i < K)[:, None] & (j < K)[None, :], other=0.0)
    return load_memory(N, column, K, K, BK, BV) + transposed


@triton.jit
def key_kernel(
    q, x_in, k, ks, e, strength, rho, eps, point, base, N, r, dk, dks, table, T, L, H, tokens, q_stride, k_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of dk; the sum over columns that is dks, in parts."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    document, begin, end, _ = segment_of(s, table, T, L)
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    place = s.to(tl.int64) * H + h
    q += h * K
    x_in += h * K
    e += h * K
    dk += h * K
    pairs = load_both(N + place * K * K, column, K, BK, BV)
    delta = tl.load(point + place * K + i, mask=i < K, other=0.0)
    delta -= tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    r_sum = tl.load(r + place * K + j, mask=j < K, other=0.0) - tl.sum(pairs * delta[:, None], 0)
    chunks = tl.cdiv(end - begin, C)
    for n in tl.range(chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - n) * C
        share = -load_numbers(strength, start, end, H, h, 0.0, C)
        of_query = load_numbers(rho, start, end, H, h, 0.0, C)
        of_grad = load_numbers(eps, start, end, H, h, 0.0, C)
        x = load_tile(x_in, start, end, H * K, 0, K, C, BK)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK).to(DOT)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK).to(DOT)
        query_columns = load_tile(q, start, end, q_stride, column, K, C, BV).to(tl.float32)
        grad_columns = load_tile(e, start, end, H * K, column, K, C, BV).to(tl.float32)
        r_added = tl.sum(grad_columns * (share * of_query)[:, None] + query_columns * (share * of_grad)[:, None], 0)
        query_columns = (query_columns * share[:, None]).to(DOT)
        grad_columns = (grad_columns * share[:, None]).to(DOT)
        found = tl.dot(x, pairs.to(DOT), input_precision=PRECISION) - r_sum[None, :]
        scores = past(tl.dot(query, tl.trans(x), input_precision=PRECISION) - of_query[:, None], C)
        found += tl.dot(tl.trans(scores.to(DOT)), grad_columns, input_precision=PRECISION)
        scores = past(tl.dot(grad, tl.trans(x), input_precision=PRECISION) - of_grad[:, None], C)
        found += tl.dot(tl.trans(scores.to(DOT)), query_columns, input_precision=PRECISION)
        pairs += tl.dot(tl.trans(query), grad_columns, input_precision=PRECISION)
        pairs += tl.dot(tl.trans(grad), query_columns, input_precision=PRECISION)
        r_sum += r_added
        if dks is not None:
            raw = load_tile(k + h * K, start, end, k_stride, column, K, C, BV).to(tl.float32)
            store_numbers(dks + block.to(tl.int64) * tokens * H, tl.sum(raw * found, 1), start, end, H, h, C)
            found *= load_numbers(ks, start, end, H, h, 1.0, C)[:, None]
        store_tile(dk, found, start, end, H * K, column, K, C, BV)


@compiled_together
def backward(q, k, lam, ks, e, rho, dstate, keys: Keys, before: Moments, final: Moments, T: int, cut: Segments, walk: Tile, collect: Tile):
    """Gradients of q, k, lam, key_scale (None if not given), and N, r, κ before the first token of each row."""
    H, K = k.shape[2:]
    dq, eps, dlam, strength = read(e, lam, keys, before, T, cut, walk, other=q)
    N, r, kappa = (torch.empty_like(x) for x in before)
    DOT, precision = dot_type(keys.x.dtype)
    common = dict(K=K, DOT=DOT, PRECISION=precision)
    sizes = (cut.table, T, cut.length, H)
    launch(
        pair_kernel, (cut.number * H,),
        q, e, keys.point, final.mean, strength, rho, eps, dlam, N, r, kappa, *sizes, q.stride(1),
        **common, C=collect.chunk, BK=padded(K), STAGES=collect.stages, num_warps=collect.warps,
    )  # fmt: skip
    dcovariance, dmean, dweight = dstate
    first_N = scan(N, torch.zeros_like(kappa), dcovariance, T, cut, reverse=True)
    first_r = torch.zeros_like(final.mean) if dmean is None else -dmean / final.weight.clamp(min=1e-30).unsqueeze(-1)
    first_kappa = torch.zeros_like(final.weight) if dweight is None else dweight.clone()
    launch(vector_scan_kernel, (cut.rows * H,), r, kappa, first_r, first_kappa, cut.first, T, cut.length, H, K, BK=padded(K), num_warps=1)
    shape = columns(K, walk)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dks = None if ks is None else ks.new_empty(shape["NB"], *ks.shape)
    launch(
        key_kernel, (cut.number * H * shape["NB"],),
        q, keys.x, k, ks, e, strength, rho, eps, keys.point, final.mean, N, r, dk, dks, *sizes, lam.numel() // H, q.stride(1), k.stride(1),
        **common, **shape, C=walk.chunk, STAGES=walk.stages, num_warps=walk.warps,
    )  # fmt: skip
    return dq, dk, dlam, None if dks is None else dks.sum(0), (first_N, first_r, first_kappa)
