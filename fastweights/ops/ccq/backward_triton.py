"""CCQ's backward kernels. With e = dq', s_t = λ_t/w_t, A the decays, and the loss's gradient of C_t's entries −s_t e_t q_tᵀ:

    dq_t = e_t − s_t·C_t e_t        (C is symmetric: the same read, of e)        dλ_t = −q_tᵀ C_t e_t / w_t
    dk_j = Σ_{t≥j} −s_t A[t, j]·( e_t·q_tᵀ(k_j − μ_t) + q_t·e_tᵀ(k_j − μ_t) )

The second line is the whole gradient, the mean's share included: Σ_t weighs (k_j − μ_t)(k_j − μ_t)ᵀ, whose derivative by μ_t is zero. With
keys and means measured from one point b of the document, x = k − b, α_t = q_tᵀ(μ_t − b), β_t = e_tᵀ(μ_t − b), the sum over later chunks is

    dk_j = (N + Nᵀ) x_j − r,   N = Σ −s A q eᵀ,   r = Σ −s A (e α + q β),   ρ = Σ −s A (α β + dλ)

where b is the document's last mean. `query_kernel` walks forward (dq, dλ, α, β, and each segment's share of r and ρ), `key_kernel` backward.
A key's share in its own decays is x N x − x·r + ρ; the gradient of log decay at r is what crosses the segment's end less those shares from r on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.ccq.forward_triton import Moments, centred, deviations, load_keys, load_moments, weights
from fastweights.ops.decay.chunk_forward_triton import contributions, scan
from fastweights.ops.decay.segments_triton import (
    Segments,
    Tile,
    decay_matrix,
    load_memory,
    load_numbers,
    load_tile,
    segment_of,
    segments_of_row,
    store_numbers,
    store_tile,
)
from fastweights.ops.tiles_triton import operand, padded, triton_type


@triton.jit
def query_kernel(
    q, k, lam, g, ks, e, covariance, mean, weight, base, dq, dlam, strength, alpha, beta, r, rho, table, T, L, H, K,
    q_stride, k_stride,
    C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    document, begin, end, _ = segment_of(s, table, T, L)
    i = tl.arange(0, BK)
    q += h * K
    k += h * K
    e += h * K
    dq += h * K
    b = tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    moment, mu, w = load_moments(covariance, mean, weight, k, ks, s, begin, end, k_stride, H, h, K, BK)
    r_sum = tl.zeros([BK], tl.float32)
    rho_sum = tl.sum(r_sum, 0)
    passed = rho_sum
    for start in tl.range(begin, end, C, num_stages=STAGES):
        valid = start + tl.arange(0, C) < end
        x = centred(load_keys(k, ks, start, end, k_stride, H, h, K, C, BK), mu, valid)
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a, keep, carry, w_before, before = weights(log_a, w, C, DECAY)
        w_after = tl.exp(log_a) * w_before + 1.0
        c = 1.0 - 1.0 / w_after
        d = deviations(x, w_before, before, valid, DOT, PRECISION)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK)
        P = tl.dot(grad.to(DOT), tl.trans(d.to(DOT)), input_precision=PRECISION) * (decay_matrix(a, C) * c[None, :])
        read = tl.dot(grad.to(DOT), moment.to(DOT), input_precision=PRECISION) * tl.exp(a)[:, None]
        read += tl.dot(P.to(DOT), d.to(DOT), input_precision=PRECISION)
        moment = moment * carry + tl.dot(tl.trans((d * (c * keep)[:, None]).to(DOT)), d.to(DOT), input_precision=PRECISION)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
        grad = grad.to(tl.float32)
        share = load_numbers(lam, start, end, H, h, 0.0, C) / w_after
        grad_lam = -tl.sum(query * read, 1) / w_after
        store_tile(dq, grad - share[:, None] * read, start, end, H * K, 0, K, C, BK)
        offset = (mu - b)[None, :] + x - c[:, None] * d  # μ_t − b, as μ_t = μ_{t-1} + d_t / w_t
        al = tl.sum(query * offset, 1)
        be = tl.sum(grad * offset, 1)
        store_numbers(dlam, grad_lam, start, end, H, h, C)
        store_numbers(strength, share, start, end, H, h, C)
        store_numbers(alpha, al, start, end, H, h, C)
        store_numbers(beta, be, start, end, H, h, C)
        share = -tl.where(valid, share, 0.0) * tl.exp(a + passed)
        r_sum += tl.sum(grad * (share * al)[:, None] + query * (share * be)[:, None], 0)
        rho_sum += tl.sum(share * (al * be + grad_lam), 0)
        passed += tl.sum(log_a, 0)
        keep = tl.where(valid, keep, 0.0)
        w = carry * w + tl.sum(keep, 0)
        mu += tl.sum(x * keep[:, None], 0) / w
    place = s.to(tl.int64) * H + h
    tl.store(r + place * K + i, r_sum, mask=i < K)
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
def key_kernel(
    q, k, g, ks, e, strength, alpha, beta, dlam, base, N, r, rho, covariance, mean, weight, final_c, final_w,
    dk, dks, dg, table, T, L, H, K, q_stride, k_stride,
    C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    s = tl.program_id(0) // H
    document, begin, end, document_end = segment_of(s, table, T, L)
    i = tl.arange(0, BK)
    place = s.to(tl.int64) * H + h
    q += h * K
    k += h * K
    e += h * K
    dk += h * K
    b = tl.load(base + (document * H + h) * K + i, mask=i < K, other=0.0)
    moment = load_memory(N + place * K * K, 0, K, K, BK, BK)
    r_sum = tl.load(r + place * K + i, mask=i < K, other=0.0)
    if DECAY:
        rho_sum = tl.load(rho + place)
        if end < document_end:
            after = load_memory(covariance + (place + H) * K * K, 0, K, K, BK, BK)
            y = tl.load(mean + (place + H) * K + i, mask=i < K, other=0.0) - b
            w = tl.load(weight + place + H)
        else:
            after = load_memory(final_c + (document * H + h) * K * K, 0, K, K, BK, BK)
            y = tl.zeros([BK], tl.float32)
            w = tl.load(final_w + document * H + h)
        crossing = tl.sum(tl.sum(moment * (after + w * y[:, None] * y[None, :]), 1), 0) + w * (rho_sum - tl.sum(y * r_sum, 0))
    chunks = tl.cdiv(end - begin, C)
    for n in tl.range(chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - n) * C
        valid = start + tl.arange(0, C) < end
        factor = load_numbers(ks, start, end, H, h, 1.0, C)[:, None]
        raw = load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
        x = centred(raw * factor, b, valid)
        query = load_tile(q, start, end, q_stride, 0, K, C, BK)
        grad = load_tile(e, start, end, H * K, 0, K, C, BK)
        share = -load_numbers(strength, start, end, H, h, 0.0, C)
        al = load_numbers(alpha, start, end, H, h, 0.0, C)
        be = load_numbers(beta, start, end, H, h, 0.0, C)
        log_a = load_numbers(g, start, end, H, h, 0.0, C)
        a = tl.cumsum(log_a, 0)
        all_a = tl.sum(log_a, 0)
        A = decay_matrix(a, C) * share[:, None]
        by_query = tl.dot(query.to(DOT), tl.trans(x.to(DOT)), input_precision=PRECISION) - al[:, None]
        by_grad = tl.dot(grad.to(DOT), tl.trans(x.to(DOT)), input_precision=PRECISION) - be[:, None]
        found = tl.dot(x.to(DOT), moment.to(DOT), input_precision=PRECISION)
        found += tl.dot(x.to(DOT), tl.trans(moment.to(DOT)), input_precision=PRECISION)
        keep = tl.exp(all_a - a)
        if DECAY:
            change = keep * (tl.sum(x * (0.5 * found - r_sum[None, :]), 1) + rho_sum)
            pairs = by_query * by_grad + load_numbers(dlam, start, end, H, h, 0.0, C)[:, None]
            change = tl.where(valid, change + tl.sum(A * pairs, 0), 0.0)
            store_numbers(dg, crossing - tl.sum(change, 0) + tl.cumsum(change, 0) - change, start, end, H, h, C)
            crossing -= tl.sum(change, 0)
        found = (found - r_sum[None, :]) * keep[:, None]
        found += tl.dot(tl.trans((by_query * A).to(DOT)), grad.to(DOT), input_precision=PRECISION)
        found += tl.dot(tl.trans((by_grad * A).to(DOT)), query.to(DOT), input_precision=PRECISION)
        store_tile(dk, found * factor, start, end, H * K, 0, K, C, BK)
        if dks is not None:
            store_numbers(dks, tl.sum(raw * found, 1), start, end, H, h, C)
        share *= tl.exp(a)
        carry = tl.exp(all_a)
        weighted = query.to(tl.float32) * share[:, None]
        moment = moment * carry + tl.dot(tl.trans(weighted.to(DOT)), grad.to(DOT), input_precision=PRECISION)
        r_sum = r_sum * carry + tl.sum(weighted * be[:, None] + grad.to(tl.float32) * (share * al)[:, None], 0)
        if DECAY:
            rho_sum = rho_sum * carry + tl.sum(share * (al * be + load_numbers(dlam, start, end, H, h, 0.0, C)), 0)


def backward(q, k, lam, g, ks, e, dstate, before: Moments, final: Moments, total: Tensor, T: int, cut: Segments, tile: Tile):
    """Gradients of q, k, lam, log_decay, key_scale (None if not given) and of the initial C, μ, w (as if w > 0)."""
    H, K = k.shape[2:]
    DOT, precision = operand(q.dtype, k.dtype)
    common = dict(
        C=tile.chunk, BK=padded(K), DECAY=g is not None, DOT=triton_type(DOT), PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps
    )
    sizes = (cut.table, T, cut.length, H, K)
    dq, dk = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dlam, strength, alpha, beta = (torch.empty_like(lam) for _ in range(4))
    dg, dks = (None if x is None else torch.empty_like(x) for x in (g, ks))
    r, rho = torch.empty_like(before.mean), torch.empty_like(before.weight)
    query_kernel[(cut.count * H,)](
        q, k, lam, g, ks, e, *before, final.mean, dq, dlam, strength, alpha, beta, r, rho, *sizes, q.stride(1), k.stride(1), **common
    )
    N = contributions(q, e, g, None, strength, cut, tile, reverse=True, scale=-1.0)
    dcovariance, dmean, dweight = dstate
    first_N = scan(N, total, dcovariance, T, cut, reverse=True)
    final_r = torch.zeros_like(final.mean) if dmean is None else -dmean / final.weight.clamp(min=1e-30).unsqueeze(-1)
    final_rho = torch.zeros_like(final.weight) if dweight is None else dweight.clone()
    vector_scan_kernel[(cut.rows * H,)](r, rho, total, final_r, final_rho, cut.first, T, cut.length, H, K, BK=padded(K), num_warps=1)
    key_kernel[(cut.count * H,)](
        q, k, g, ks, e, strength, alpha, beta, dlam, final.mean, N, r, rho, *before, final.covariance, final.weight,
        dk, dks, dg, *sizes, q.stride(1), k.stride(1), **common,
    )  # fmt: skip
    return dq, dk, dlam, dg, dks, (first_N, final_r, final_rho)
