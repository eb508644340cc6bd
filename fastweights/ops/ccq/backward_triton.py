"""CCQ's backward kernels. With e = dq', s_t = λ_t/w_t and A the decays:

    dq_t = e_t − s_t·C_t e_t        (C is symmetric: the same read, of e)        dλ_t = −q_tᵀ C_t e_t / w_t
    dk_j = Σ_{t≥j} −s_t A[t, j]·( e_t·q_tᵀ(k_j − μ_t) + q_t·e_tᵀ(k_j − μ_t) )

The second line is the whole gradient, the mean's share included: Σ_t weighs (k_j − μ_t)(k_j − μ_t)ᵀ, whose derivative by μ_t is zero. With
keys and means measured from one point b of the document, x = k − b, α_t = q_tᵀ(μ_t − b), β_t = e_tᵀ(μ_t − b), the sum over later chunks is

    dk_j = (N + Nᵀ) x_j − r,   N = Σ −s A q eᵀ,   r = Σ −s A (e α + q β),   ρ = Σ −s A (α β + dλ)

where b is the document's last mean. The forward's `read_kernel` gives dq, dλ and β; `pair_kernel` each segment's own N, r and ρ; after their
scans `key_kernel` walks backward and gives dk. A key's share in its decays is x N x − x·r + ρ; the gradient of log decay at r is what
crosses the segment's end less the shares of the keys from r on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.ccq.forward_triton import Moments, along, centred, columns, decayed, load_mean, read
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
from fastweights.ops.tiles_triton import padded


@triton.jit
def pair_kernel(
    q, e, k, g, ks, mean, weight, base, strength, alpha, beta, dlam, alpha_out, beta_out, N, r, rho,
    table, T, L, H, q_stride, k_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment alone adds to N, r and ρ before it; and α, β, which come measured from the segment's own point, from the document's."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    document, begin, end, _ = segment_of(s, table, T, L)
    place = s.to(tl.int64) * H + h
    q += h * K
    e += h * K
    i = tl.arange(0, BK)
    moved = load_mean(mean, tl.load(weight + place), k + h * K, ks, place, begin, end, k_stride, H, h, 0, K, BK)
    moved -= tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    pairs = tl.zeros([BK, BV], tl.float32)
    r_sums = tl.zeros([C, BV], tl.float32)  # rows are added up once, at the end
    rho_sum = tl.sum(tl.zeros([C], tl.float32), 0)
    passed = rho_sum
    for start in tl.range(begin, end, C, num_stages=STAGES):
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        share = -load_numbers(strength, start, end, H, h, 0.0, C)
        if DECAY:
            share *= tl.exp(tl.cumsum(log_a, 0) + passed)
            passed += tl.sum(log_a, 0)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK)
        al = load_numbers(alpha, start, end, H, h, 0.0, C) + along(query, moved, BK, DOT, PRECISION)
        be = load_numbers(beta, start, end, H, h, 0.0, C) + along(grad, moved, BK, DOT, PRECISION)
        if block == 0:
            store_numbers(alpha_out, al, start, end, H, h, C)
            store_numbers(beta_out, be, start, end, H, h, C)
        if NB == 1:
            query_columns = query.to(tl.float32)
            grad_columns = grad.to(tl.float32)
        else:
            query_columns = load_tile(q, start, end, q_stride, column, K, C, BV).to(tl.float32)
            grad_columns = load_tile(e, start, end, H * K, column, K, C, BV).to(tl.float32)
        grad_columns *= share[:, None]
        pairs += tl.dot(tl.trans(query.to(DOT)), grad_columns.to(DOT), input_precision=PRECISION)
        r_sums += grad_columns * al[:, None] + query_columns * (share * be)[:, None]
        rho_sum += tl.sum(share * (al * be + load_numbers(dlam, start, end, H, h, 0.0, C)), 0)
    store_memory(N + place * K * K, pairs, column, K, K, BK, BV)
    j = column + tl.arange(0, BV)
    tl.store(r + place * K + j, tl.sum(r_sums, 0), mask=j < K)
    if block == 0:
        tl.store(rho + place, rho_sum)


@triton.jit
def vector_scan_kernel(r, rho, total, final_r, final_rho, first, T, L, H, K, BK: tl.constexpr):
    """Backward in place: each segment's share of r and ρ becomes their sum over all after it; ``final_*`` go in and come out."""
    row = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(row, first, T, L)
    i = tl.arange(0, BK)
    r_sum = tl.load(final_r + tl.program_id(0).to(tl.int64) * K + i, mask=i < K, other=0.0)
    rho_sum = tl.load(final_rho + tl.program_id(0))
    for n in tl.range(count, num_stages=4):
        s = (begin + count - 1 - n) * H + h
        own_r = tl.load(r + s * K + i, mask=i < K, other=0.0)
        own_rho = tl.load(rho + s)
        a = tl.exp(tl.load(total + s))
        tl.store(r + s * K + i, r_sum, mask=i < K)
        tl.store(rho + s, rho_sum)
        r_sum = a * r_sum + own_r
        rho_sum = a * rho_sum + own_rho
    tl.store(final_r + tl.program_id(0).to(tl.int64) * K + i, r_sum, mask=i < K)
    tl.store(final_rho + tl.program_id(0), rho_sum)


@triton.jit
def load_both(N, column, K, BK: tl.constexpr, BV: tl.constexpr):
    """Columns of N + Nᵀ."""
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    transposed = tl.load(N + j[None, :] * K + i[:, None], mask=(i < K)[:, None] & (j < K)[None, :], other=0.0)
    return load_memory(N, column, K, K, BK, BV) + transposed


@triton.jit
def key_kernel(
    q, k, g, ks, e, strength, alpha, beta, dlam, base, N, r, rho, covariance, mean, weight, final_c, final_w,
    dk, dks, dg, table, T, L, H, tokens, q_stride, k_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, DECAY: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of dk; the sums over columns, dks and dg, in parts."""
    block = tl.program_id(0) % NB
    h = tl.program_id(0) // NB % H
    s = tl.program_id(0) // NB // H
    column = block * BV
    document, begin, end, document_end = segment_of(s, table, T, L)
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    place = s.to(tl.int64) * H + h
    part = block.to(tl.int64) * tokens * H
    q += h * K
    k += h * K
    e += h * K
    dk += h * K
    b = tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    b_columns = tl.load(base + (document * H + h) * K + j, mask=j < K, other=0.0)
    pairs = load_both(N + place * K * K, column, K, BK, BV)
    r_sum = tl.load(r + place * K + j, mask=j < K, other=0.0)
    if DECAY:
        rho_sum = tl.load(rho + place) * (block == 0).to(tl.float32)
        if end < document_end:
            after = load_memory(covariance + (place + H) * K * K, column, K, K, BK, BV)
            w = tl.load(weight + place + H)
            y = tl.load(mean + (place + H) * K + i, mask=i < K, other=0.0) - b
            y_columns = tl.load(mean + (place + H) * K + j, mask=j < K, other=0.0) - b_columns
        else:
            after = load_memory(final_c + (document * H + h) * K * K, column, K, K, BK, BV)
            w = tl.load(final_w + document * H + h)
            y = tl.zeros([BK], tl.float32)
            y_columns = tl.zeros([BV], tl.float32)
        crossing = 0.5 * tl.sum(tl.sum(pairs * (after + w * y[:, None] * y_columns[None, :]), 1), 0)
        crossing += w * (rho_sum - tl.sum(y_columns * r_sum, 0))
    chunks = tl.cdiv(end - begin, C)
    for n in tl.range(chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - n) * C
        valid = start + tl.arange(0, C) < end
        factor = load_numbers(ks, start, end, H, h, 1.0, C)[:, None]
        share = -load_numbers(strength, start, end, H, h, 0.0, C)
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a = tl.cumsum(log_a, 0)
        keep = tl.exp(tl.sum(log_a, 0) - a)
        carry = tl.exp(tl.sum(log_a, 0)) if DECAY else 1.0
        x = centred(load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32) * factor, b, valid).to(DOT)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK).to(DOT)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK).to(DOT)
        al = load_numbers(alpha, start, end, H, h, 0.0, C)
        be = load_numbers(beta, start, end, H, h, 0.0, C)
        if NB == 1:
            query_columns = query
            grad_columns = grad
        else:
            query_columns = load_tile(q, start, end, q_stride, column, K, C, BV).to(DOT)
            grad_columns = load_tile(e, start, end, H * K, column, K, C, BV).to(DOT)
        past = share * tl.exp(a) if DECAY else share
        r_added = grad_columns.to(tl.float32) * (past * al)[:, None] + query_columns.to(tl.float32) * (past * be)[:, None]
        r_added = tl.sum(r_added, 0)
        query_weighted = (query_columns.to(tl.float32) * share[:, None]).to(DOT)
        grad_weighted = (grad_columns.to(tl.float32) * share[:, None]).to(DOT)
        by_query = tl.dot(query, tl.trans(x), input_precision=PRECISION) - al[:, None]
        found = tl.dot(x, pairs.to(DOT), input_precision=PRECISION)
        if DECAY:
            x_columns = centred(load_tile(k, start, end, k_stride, column, K, C, BV).to(tl.float32) * factor, b_columns, valid)
            change = keep * (tl.sum(x_columns * (0.5 * found - r_sum[None, :]), 1) + rho_sum)
            found = (found - r_sum[None, :]) * keep[:, None]
        else:
            found -= r_sum[None, :]
        found += tl.dot(tl.trans(decayed(by_query, a, C, DECAY).to(DOT)), grad_weighted, input_precision=PRECISION)
        by_grad = tl.dot(grad, tl.trans(x), input_precision=PRECISION) - be[:, None]
        found += tl.dot(tl.trans(decayed(by_grad, a, C, DECAY).to(DOT)), query_weighted, input_precision=PRECISION)
        store_tile(dk, found * factor, start, end, H * K, column, K, C, BV)
        if dks is not None:
            raw = load_tile(k, start, end, k_stride, column, K, C, BV).to(tl.float32)
            store_numbers(dks + part, tl.sum(raw * found, 1), start, end, H, h, C)
        if DECAY:
            grad_lam = load_numbers(dlam, start, end, H, h, 0.0, C)
            if block == 0:
                change += tl.sum(decayed((by_query * by_grad + grad_lam[:, None]) * share[:, None], a, C, DECAY), 0)
            change = tl.where(valid, change, 0.0)
            store_numbers(dg + part, crossing - tl.sum(change, 0) + tl.cumsum(change, 0) - change, start, end, H, h, C)
            crossing -= tl.sum(change, 0)
            added = tl.sum(past * (al * be + grad_lam), 0)
            rho_sum = rho_sum * carry + added * (block == 0).to(tl.float32)
            query_weighted = (query_columns.to(tl.float32) * past[:, None]).to(DOT)
            grad_weighted = (grad_columns.to(tl.float32) * past[:, None]).to(DOT)
        r_sum = r_sum * carry + r_added
        pairs = pairs * carry + tl.dot(tl.trans(query), grad_weighted, input_precision=PRECISION)
        pairs += tl.dot(tl.trans(grad), query_weighted, input_precision=PRECISION)


def backward(
    q, k, lam, g, ks, e, rho_q, dstate, before: Moments, final: Moments, total: Tensor, T: int, cut: Segments, walk: Tile, collect: Tile
):  # fmt: skip
    """Gradients of q, k, lam, log_decay, key_scale (None if not given), and N, r, ρ before the first token of each row."""
    H, K = k.shape[2:]
    DOT, precision = dot_type(q.dtype, k.dtype)
    common = dict(K=K, DECAY=g is not None, DOT=DOT, PRECISION=precision)
    sizes = (cut.table, T, cut.length, H)
    dq, rho_e, dlam, strength = read(e, k, lam, g, ks, before, T, cut, walk, other=q)
    N, r, rho = (torch.empty_like(x) for x in before)
    alpha, beta = torch.empty_like(lam), torch.empty_like(lam)
    shape = columns(K, collect)
    pair_kernel[(cut.count * H * shape["NB"],)](
        q, e, k, g, ks, before.mean, before.weight, final.mean, strength, rho_q, rho_e, dlam, alpha, beta, N, r, rho,
        *sizes, q.stride(1), k.stride(1), **common, **shape, C=collect.chunk, STAGES=collect.stages, num_warps=collect.warps,
    )  # fmt: skip
    dcovariance, dmean, dweight = dstate
    first_N = scan(N, total, dcovariance, T, cut, reverse=True)
    first_r = torch.zeros_like(final.mean) if dmean is None else -dmean / final.weight.clamp(min=1e-30).unsqueeze(-1)
    first_rho = torch.zeros_like(final.weight) if dweight is None else dweight.clone()
    vector_scan_kernel[(cut.rows * H,)](r, rho, total, first_r, first_rho, cut.first, T, cut.length, H, K, BK=padded(K), num_warps=1)
    shape = columns(K, walk)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dg, dks = (None if x is None else x.new_empty(shape["NB"], *x.shape) for x in (g, ks))
    key_kernel[(cut.count * H * shape["NB"],)](
        q, k, g, ks, e, strength, alpha, beta, dlam, final.mean, N, r, rho, *before, final.covariance, final.weight,
        dk, dks, dg, *sizes, lam.numel() // H, q.stride(1), k.stride(1),
        **common, **shape, C=walk.chunk, STAGES=1, num_warps=walk.warps,
    )  # fmt: skip
    return dq, dk, dlam, None if dg is None else dg.sum(0), None if dks is None else dks.sum(0), (first_N, first_r, first_rho)
