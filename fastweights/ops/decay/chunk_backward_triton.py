"""The ``decay`` family's backward kernels.

`query_kernel` walks forward through a segment with the memory S and gives dq; `key_value_kernel` walks backward with D, the gradient of the
memory after the chunk, and gives dk, dv. With A[t, j] = exp(g_t − g_j), j ≤ t, and G, E the same products as in the forward, masked by A:

    dq_t = exp(g_t)·(S do_t)        + Σ_{j≤t} A[t, j] (do_tᵀ v_j) k_j
    dk_j = exp(g_C − g_j)·(D v_j)   + Σ_{t≥j} A[t, j] (do_tᵀ v_j) q_t
    dv_j = Dᵀ (exp(g_C − g_j)·k_j)  + Σ_{t≥j} A[t, j] (q_tᵀ k_j) do_t
    D'   = exp(g_C)·D + Σ_t (exp(g_t)·q_t) do_tᵀ

The gradient of log decay at r is what every pair (j, t), j < r ≤ t, adds to the loss: the pairs with t in the segment are q_t·dq_t summed
from r on, less k_j·dk_j summed from r on, plus S·D at the segment's end. Sums so never run over more than one segment, and lose no digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.decay.chunk_forward_triton import (
    channel_scores,
    contributions,
    from_row,
    heads_in,
    load_decay,
    row,
    scan,
    tile_side,
)
from fastweights.ops.decay.segments_triton import (
    Segments,
    Tile,
    decay_matrix,
    dot_type,
    load_memory,
    load_numbers,
    load_tile,
    segment_of,
    store_numbers,
    store_tile,
)
from fastweights.ops.launch_triton import compiled_together, launch


@triton.jit
def to_row(coarse, fine, t, C: tl.constexpr):
    """``exp(g_t − g_j)`` per channel ``[C, K]``; 1 for j > t, where it is not looked at."""
    return tl.exp(tl.minimum((row(coarse, t, C)[None, :] - coarse) + (row(fine, t, C)[None, :] - fine), 0.0))


@triton.jit
def query_kernel(
    k, v, g, qs, ks, vs, q, do, memory, dq, dqs, qdq, table, T, L, H, G, tokens,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of value columns ``block·BV …`` alone, and q·dq (a number a token, or one a channel)."""
    pid = tl.program_id(0)
    block = pid % NB
    h = pid // NB % H
    s = pid // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    S = load_memory(memory + (s.to(tl.int64) * H + h) * K * V, block * BV, K, V, BK, BV)
    part = block.to(tl.int64) * tokens
    q += h // G * K
    k += h // G * K
    v += h * V
    do += h * V
    dq += (part * H + h) * K
    for start in tl.range(begin, end, C, num_stages=STAGES):
        x = load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
        y = load_tile(v, start, end, v_stride, block * BV, V, C, BV).to(tl.float32)
        z = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
        e = load_tile(do, start, end, H * V, block * BV, V, C, BV).to(DOT)
        x *= load_numbers(ks, start, end, ks_heads, h * ks_heads // H, 1.0, C)[:, None]
        y *= load_numbers(vs, start, end, vs_heads, h * vs_heads // H, 1.0, C)[:, None]
        factor = load_numbers(qs, start, end, qs_heads, h * qs_heads // H, 1.0, C)[:, None] * scale
        since, keep, carry, _all, coarse, fine = load_decay(g, start, end, h, H, G, K, C, BK, CHANNEL)
        grad = tl.dot(e, tl.trans(S.to(DOT)), input_precision=PRECISION) * since
        E = tl.dot(e, tl.trans(y.to(DOT)), input_precision=PRECISION)
        if CHANNEL:
            i = tl.arange(0, C)
            E = tl.where(i[:, None] >= i[None, :], E, 0.0)
            for j in range(C):
                column = tl.sum(tl.where(i[None, :] == j, E, 0.0), 1)
                grad += column[:, None] * row(x, j, C)[None, :] * from_row(coarse, fine, j, C)
        else:
            grad += tl.dot((E * decay_matrix(coarse, fine, C)).to(DOT), x.to(DOT), input_precision=PRECISION)
        store_tile(dq, grad * factor, start, end, H * K, 0, K, C, BK)
        if dqs is not None:
            store_numbers(dqs + part * H, tl.sum(z * grad, 1) * scale, start, end, H, h, C)
        if qdq is not None:
            if CHANNEL:
                store_tile(qdq + (part * H + h) * K, z * grad * factor, start, end, H * K, 0, K, C, BK)
            else:
                store_numbers(qdq + part * H, tl.sum(z * grad * factor, 1), start, end, H, h, C)
        x *= keep
        S = S * carry + tl.dot(tl.trans(x.to(DOT)), y.to(DOT), input_precision=PRECISION)


@triton.jit
def key_value_kernel(
    q, k, v, g, qs, ks, vs, do, after, memory, final, dk, dv, dks, dvs, qdq, dg, table, T, L, H, G, tokens,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk of value columns ``block·BV …`` alone, dv, and dg made from the q·dq of `query_kernel`."""
    pid = tl.program_id(0)
    block = pid % NB
    h = pid // NB % H
    s = pid // NB // H
    r, begin, end, row_end = segment_of(s, table, T, L)
    D = load_memory(after + (s.to(tl.int64) * H + h) * K * V, block * BV, K, V, BK, BV)
    if dg is not None:
        if end < row_end:
            S = load_memory(memory + (s.to(tl.int64) * H + H + h) * K * V, block * BV, K, V, BK, BV)
        else:
            S = load_memory(final + (r * H + h) * K * V, block * BV, K, V, BK, BV)
        crossing = tl.sum(S * D, 1) if CHANNEL else tl.sum(tl.sum(S * D, 1), 0)
    part = block.to(tl.int64) * tokens
    q += h // G * K
    k += h // G * K
    v += h * V
    do += h * V
    dk += (part * H + h) * K
    dv += h * V
    chunks = tl.cdiv(end - begin, C)
    for n in tl.range(chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - n) * C
        raw_k = load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
        raw_v = load_tile(v, start, end, v_stride, block * BV, V, C, BV).to(tl.float32)
        z = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
        e = load_tile(do, start, end, H * V, block * BV, V, C, BV).to(DOT)
        k_factor = load_numbers(ks, start, end, ks_heads, h * ks_heads // H, 1.0, C)[:, None]
        v_factor = load_numbers(vs, start, end, vs_heads, h * vs_heads // H, 1.0, C)[:, None]
        z *= load_numbers(qs, start, end, qs_heads, h * qs_heads // H, 1.0, C)[:, None]
        x = raw_k * k_factor
        y = (raw_v * v_factor).to(DOT)
        since, keep, carry, _all, coarse, fine = load_decay(g, start, end, h, H, G, K, C, BK, CHANNEL)
        E = tl.dot(e, tl.trans(y), input_precision=PRECISION)
        grad_k = tl.dot(y, tl.trans(D.to(DOT)), input_precision=PRECISION) * keep
        if CHANNEL:
            P = channel_scores(z, x, coarse, fine, C) * scale
            i = tl.arange(0, C)
            E = tl.where(i[:, None] >= i[None, :], E, 0.0) * scale
            for t in range(C):
                weight = tl.sum(tl.where(i[:, None] == t, E, 0.0), 0)
                grad_k += weight[:, None] * row(z, t, C)[None, :] * to_row(coarse, fine, t, C)
        else:
            A = decay_matrix(coarse, fine, C) * scale
            P = tl.dot(z.to(DOT), tl.trans(x.to(DOT)), input_precision=PRECISION) * A
            E *= A
            grad_k += tl.dot(tl.trans(E.to(DOT)), z.to(DOT), input_precision=PRECISION)
        grad_v = tl.dot((x * keep).to(DOT), D.to(DOT), input_precision=PRECISION)
        grad_v += tl.dot(tl.trans(P.to(DOT)), e, input_precision=PRECISION)
        store_tile(dk, grad_k * k_factor, start, end, H * K, 0, K, C, BK)
        store_tile(dv, grad_v * v_factor, start, end, H * V, block * BV, V, C, BV)
        if dks is not None:
            store_numbers(dks + part * H, tl.sum(raw_k * grad_k, 1), start, end, H, h, C)
        if dvs is not None:
            store_numbers(dvs + part * H, tl.sum(raw_v * grad_v, 1), start, end, H, h, C)
        if dg is not None:
            if CHANNEL:
                change = load_tile(qdq + (part * H + h) * K, start, end, H * K, 0, K, C, BK) - x * grad_k
                store_tile(
                    dg + (part * H + h) * K,
                    crossing[None, :] + tl.sum(change, 0)[None, :] - tl.cumsum(change, 0) + change,
                    start, end, H * K, 0, K, C, BK,
                )  # fmt: skip
            else:
                change = load_numbers(qdq + part * H, start, end, H, h, 0.0, C) - tl.sum(x * grad_k, 1)
                store_numbers(dg + part * H, crossing + tl.sum(change, 0) - tl.cumsum(change, 0) + change, start, end, H, h, C)
            crossing += tl.sum(change, 0)
        z *= since * scale
        D = D * carry + tl.dot(tl.trans(z.to(DOT)), e, input_precision=PRECISION)


@compiled_together
def backward(
    q, k, v, g, qs, ks, vs, do, dfinal, memory, total, final, cut: Segments, tile: Tile, scale: float, *, need_dg: bool
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, log_decay, query_scale, key_scale, value_scale and initial state; None for a coefficient not given. T ≥ 1."""
    (B, T, Hk, K), (Hv, V) = k.shape, v.shape[2:]
    channel = g is not None and g.dim() == 4
    need_dg = need_dg and g is not None
    DOT, precision = dot_type(q.dtype, k.dtype, v.dtype)
    BV = tile_side(min(V, tile.columns), DOT)
    blocks = triton.cdiv(V, BV)
    parts = blocks * (Hv // Hk)

    def per_part(like: Tensor, *shape: int) -> Tensor:
        """Room for what each block of columns and each value head adds; with one of each, the result itself."""
        return torch.empty(blocks, B, T, Hv, *shape, dtype=like.dtype if parts == 1 else torch.float32, device=like.device)

    def added(x: Tensor, like: Tensor) -> Tensor:
        x = x[0] if x.shape[0] == 1 else x.sum(0)
        return x if x.shape[2] == like.shape[2] else x.unflatten(2, (like.shape[2], -1)).sum(3)

    dq, dk, dv = per_part(q, K), per_part(k, K), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    dqs, dks, dvs = (None if x is None else per_part(x) for x in (qs, ks, vs))
    qdq, dg = (per_part(g, *([K] if channel else [])) if need_dg else None for _ in range(2))  # in place, its threads would race
    common = dict(
        K=K, V=V, C=tile.chunk, BK=tile_side(K, DOT), BV=BV, NB=blocks, CHANNEL=channel,
        DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    strides = (q.stride(1), k.stride(1), v.stride(1), heads_in(qs), heads_in(ks), heads_in(vs), scale)
    sizes = (cut.table, T, cut.length, Hv, Hv // Hk, B * T)
    grid = (cut.number * Hv * blocks,)
    launch(query_kernel, grid, k, v, g, qs, ks, vs, q, do, memory, dq, dqs, qdq, *sizes, *strides, **common)
    after = contributions(q, do, g, qs, None, cut, tile, reverse=True, scale=scale)
    dstate = scan(after, total, dfinal, T, cut, reverse=True)
    launch(key_value_kernel, grid, q, k, v, g, qs, ks, vs, do, after, memory, final, dk, dv, dks, dvs, qdq, dg, *sizes, *strides, **common)
    like_g = k if channel else v
    coefficients = (None if x is None else added(x, like) for x, like in ((dg, like_g), (dqs, qs), (dks, ks), (dvs, vs)))
    return added(dq, q).to(q.dtype), added(dk, k).to(k.dtype), dv, *coefficients, dstate
