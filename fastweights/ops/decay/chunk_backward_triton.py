"""The ``decay`` family's backward kernels.

`query_kernel` walks forward through a segment with the memory S and gives dq; `key_value_kernel` walks backward with D, the gradient of the
memory after the chunk, and gives dk, dv. With A[t, j] = exp(g_t − g_j), j ≤ t, and G, E the same products as in the forward, masked by A:

    dq_t = exp(g_t)·(S do_t)        + Σ_{j≤t} A[t, j] (do_tᵀ v_j) k_j
    dk_j = exp(g_C − g_j)·(D v_j)   + Σ_{t≥j} A[t, j] (do_tᵀ v_j) q_t
    dv_j = Dᵀ (exp(g_C − g_j)·k_j)  + Σ_{t≥j} A[t, j] (q_tᵀ k_j) do_t
    D'   = exp(g_C)·D + Σ_t (exp(g_t)·q_t) do_tᵀ

A chunk with a decay per channel goes one of two ways, as in the forward; there x·dx of the factored q and k is that of q and k itself.

The gradient of log decay at r is what every pair (j, t), j < r ≤ t, adds to the loss: the pairs with t in the segment are q_t·dq_t summed
from r on, less k_j·dk_j summed from r on, plus S·D at the segment's end. Sums so never run over more than one segment, and lose no digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.decay.chunk_forward_triton import (
    causal,
    channel_scores,
    contributions,
    from_row,
    halves,
    heads_in,
    is_mild,
    load_decay,
    load_logs,
    load_scaled,
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
def query_chunk(
    S, k, v, g, qs, ks, vs, q, do, dq, dqs, qdq, start, end, h, H, G,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dqs and q·dq of one chunk; returns the memory after it."""
    x = load_scaled(k, ks, start, end, k_stride, ks_heads, h, H, 0, K, C, BK)
    y = load_scaled(v, vs, start, end, v_stride, vs_heads, h, H, column, V, C, BV)
    z = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
    e = load_tile(do, start, end, H * V, column, V, C, BV).to(DOT)
    factor = load_numbers(qs, start, end, qs_heads, h * qs_heads // H, 1.0, C)[:, None] * scale
    since, keep, carry, _all, coarse, fine = load_decay(g, start, end, h, H, G, K, C, BK, CHANNEL)
    grad = tl.dot(e, tl.trans(S.to(DOT)), input_precision=PRECISION) * since
    E = tl.dot(e, tl.trans(y.to(DOT)), input_precision=PRECISION)
    if CHANNEL:
        i = tl.arange(0, C)
        E = causal(E, C)
        for j in range(C):
            weight = tl.sum(tl.where(i[None, :] == j, E, 0.0), 1)
            grad += weight[:, None] * row(x, j, C)[None, :] * from_row(coarse, fine, j, C)
    else:
        grad += tl.dot((E * decay_matrix(coarse, fine, C)).to(DOT), x.to(DOT), input_precision=PRECISION)
    store_query(grad, z, factor, scale, dq, dqs, qdq, start, end, h, H, K, C, BK, CHANNEL)
    x *= keep
    return S * carry + tl.dot(tl.trans(x.to(DOT)), y.to(DOT), input_precision=PRECISION)


@triton.jit
def mild_query_chunk(
    S, k, v, logs, qs, ks, vs, q, do, dq, dqs, qdq, start, end, h, H,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same where `is_mild` of the chunk's log decays."""
    up, down, half = halves(logs, PRECISION)
    x = (load_scaled(k, ks, start, end, k_stride, ks_heads, h, H, 0, K, C, BK) * down).to(DOT)
    y = load_scaled(v, vs, start, end, v_stride, vs_heads, h, H, column, V, C, BV).to(DOT)
    e = load_tile(do, start, end, H * V, column, V, C, BV).to(DOT)
    E = causal(tl.dot(e, tl.trans(y), input_precision=PRECISION), C)
    S *= half[:, None]
    grad = tl.dot(e, tl.trans(S.to(DOT)), input_precision=PRECISION)
    grad += tl.dot(E.to(DOT), x, input_precision=PRECISION)
    z = load_tile(q, start, end, q_stride, 0, K, C, BK).to(tl.float32)
    factor = load_numbers(qs, start, end, qs_heads, h * qs_heads // H, 1.0, C)[:, None] * scale
    store_query(grad * up, z, factor, scale, dq, dqs, qdq, start, end, h, H, K, C, BK, True)
    return (S + tl.dot(tl.trans(x), y, input_precision=PRECISION)) * half[:, None]


@triton.jit
def store_query(
    grad, z, factor, scale, dq, dqs, qdq, start, end, h, H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr
):  # fmt: skip
    """What the gradient of ``query_scale·scale·z`` is to the operands."""
    store_tile(dq, grad * factor, start, end, H * K, 0, K, C, BK)
    if dqs is not None:
        store_numbers(dqs, tl.sum(z * grad, 1) * scale, start, end, H, h, C)
    if qdq is not None:
        if CHANNEL:
            store_tile(qdq, z * grad * factor, start, end, H * K, 0, K, C, BK)
        else:
            store_numbers(qdq, tl.sum(z * grad * factor, 1), start, end, H, h, C)


@triton.jit
def query_kernel(
    k, v, g, qs, ks, vs, q, do, memory, dq, dqs, qdq, table, T, L, H, G, tokens,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of value columns ``column …`` alone, and q·dq (a number a token, or one a channel)."""
    pid = tl.program_id(0)
    block = pid % NB
    column = block * BV
    h = pid // NB % H
    s = pid // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    S = load_memory(memory + (s.to(tl.int64) * H + h) * K * V, column, K, V, BK, BV)
    part = block.to(tl.int64) * tokens * H
    q += h // G * K
    k += h // G * K
    v += h * V
    do += h * V
    dq += (part + h) * K
    if dqs is not None:
        dqs += part
    if qdq is not None:
        qdq += (part + h) * K if CHANNEL else part
    for start in tl.range(begin, end, C, num_stages=STAGES):
        if CHANNEL:
            logs = load_logs(g, start, end, h, H, G, K, C, BK)
            if is_mild(logs, PRECISION):
                S = mild_query_chunk(
                    S, k, v, logs, qs, ks, vs, q, do, dq, dqs, qdq, start, end, h, H,
                    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, DOT, PRECISION,
                )  # fmt: skip
            else:
                for few in range(start, tl.minimum(start + C, end), 16):
                    S = query_chunk(
                        S, k, v, g, qs, ks, vs, q, do, dq, dqs, qdq, few, end, h, H, G,
                        q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, 16, BK, BV, True, DOT, PRECISION,
                    )  # fmt: skip
        else:
            S = query_chunk(
                S, k, v, g, qs, ks, vs, q, do, dq, dqs, qdq, start, end, h, H, G,
                q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, False, DOT, PRECISION,
            )  # fmt: skip


@triton.jit
def key_value_chunk(
    D, crossing, q, k, v, g, qs, ks, vs, do, dk, dv, dks, dvs, qdq, dg, start, end, h, H, G,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv, dks, dvs and dg of one chunk; returns D, and what crosses from later tokens, before it."""
    raw_k = load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
    raw_v = load_tile(v, start, end, v_stride, column, V, C, BV).to(tl.float32)
    z = load_scaled(q, qs, start, end, q_stride, qs_heads, h, H, 0, K, C, BK)
    e = load_tile(do, start, end, H * V, column, V, C, BV).to(DOT)
    k_factor = load_numbers(ks, start, end, ks_heads, h * ks_heads // H, 1.0, C)[:, None]
    v_factor = load_numbers(vs, start, end, vs_heads, h * vs_heads // H, 1.0, C)[:, None]
    x = raw_k * k_factor
    y = (raw_v * v_factor).to(DOT)
    since, keep, carry, _all, coarse, fine = load_decay(g, start, end, h, H, G, K, C, BK, CHANNEL)
    E = tl.dot(e, tl.trans(y), input_precision=PRECISION)
    grad_k = tl.dot(y, tl.trans(D.to(DOT)), input_precision=PRECISION) * keep
    if CHANNEL:
        P = channel_scores(z, x, coarse, fine, C) * scale
        i = tl.arange(0, C)
        E = causal(E, C) * scale
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
    store_tile(dv, grad_v * v_factor, start, end, H * V, column, V, C, BV)
    if dks is not None:
        store_numbers(dks, tl.sum(raw_k * grad_k, 1), start, end, H, h, C)
    if dvs is not None:
        store_numbers(dvs, tl.sum(raw_v * grad_v, 1), start, end, H, h, C)
    if dg is not None:
        if CHANNEL:
            crossing = store_channel_decay(x * grad_k, crossing, qdq, dg, start, end, H, K, C, BK)
        else:
            change = load_numbers(qdq, start, end, H, h, 0.0, C) - tl.sum(x * grad_k, 1)
            store_numbers(dg, crossing + tl.sum(change, 0) - tl.cumsum(change, 0) + change, start, end, H, h, C)
            crossing += tl.sum(change, 0)
    z *= since * scale
    return D * carry + tl.dot(tl.trans(z.to(DOT)), e, input_precision=PRECISION), crossing


@triton.jit
def mild_key_value_chunk(
    D, crossing, q, k, v, logs, qs, ks, vs, do, dk, dv, dks, dvs, qdq, dg, start, end, h, H,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same where `is_mild` of the chunk's log decays. What D is multiplied with comes first, dv before dk, and tiles are loaded
    again rather than kept: registers and shared memory are short.
    """
    up, down, half = halves(logs, PRECISION)
    x = (load_scaled(k, ks, start, end, k_stride, ks_heads, h, H, 0, K, C, BK) * down).to(DOT)
    D *= half[:, None]
    grad_v = tl.dot(x, D.to(DOT), input_precision=PRECISION)
    z = (load_scaled(q, qs, start, end, q_stride, qs_heads, h, H, 0, K, C, BK) * (up * scale)).to(DOT)
    P = causal(tl.dot(z, tl.trans(x), input_precision=PRECISION), C)
    e = load_tile(do, start, end, H * V, column, V, C, BV).to(DOT)
    grad_v += tl.dot(tl.trans(P.to(DOT)), e, input_precision=PRECISION)
    v_factor = load_numbers(vs, start, end, vs_heads, h * vs_heads // H, 1.0, C)[:, None]
    store_tile(dv, grad_v * v_factor, start, end, H * V, column, V, C, BV)
    y = load_tile(v, start, end, v_stride, column, V, C, BV).to(tl.float32)
    if dvs is not None:
        store_numbers(dvs, tl.sum(y * grad_v, 1), start, end, H, h, C)
    y = (y * v_factor).to(DOT)
    E = causal(tl.dot(e, tl.trans(y), input_precision=PRECISION), C)
    grad_k = tl.dot(y, tl.trans(D.to(DOT)), input_precision=PRECISION)
    grad_k += tl.dot(tl.trans(E.to(DOT)), z, input_precision=PRECISION)
    grad_k *= down
    k_factor = load_numbers(ks, start, end, ks_heads, h * ks_heads // H, 1.0, C)[:, None]
    store_tile(dk, grad_k * k_factor, start, end, H * K, 0, K, C, BK)
    grad_k *= load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
    if dks is not None:
        store_numbers(dks, tl.sum(grad_k, 1), start, end, H, h, C)
    if dg is not None:
        crossing = store_channel_decay(grad_k * k_factor, crossing, qdq, dg, start, end, H, K, C, BK)
    return (D + tl.dot(tl.trans(z), e, input_precision=PRECISION)) * half[:, None], crossing


@triton.jit
def store_channel_decay(kdk, crossing, qdq, dg, start, end, H, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """dg of a chunk from its k·dk and q·dq per channel; returns what crosses into it from the chunk before."""
    change = load_tile(qdq, start, end, H * K, 0, K, C, BK) - kdk
    all_ = tl.sum(change, 0)
    store_tile(dg, (crossing + all_)[None, :] - tl.cumsum(change, 0) + change, start, end, H * K, 0, K, C, BK)
    return crossing + all_


@triton.jit
def key_value_kernel(
    q, k, v, g, qs, ks, vs, do, after, memory, final, dk, dv, dks, dvs, qdq, dg, table, T, L, H, G, tokens,
    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk of value columns ``column …`` alone, dv, and dg made from the q·dq of `query_kernel`."""
    pid = tl.program_id(0)
    block = pid % NB
    column = block * BV
    h = pid // NB % H
    s = pid // NB // H
    r, begin, end, row_end = segment_of(s, table, T, L)
    D = load_memory(after + (s.to(tl.int64) * H + h) * K * V, column, K, V, BK, BV)
    crossing = tl.zeros([BK], tl.float32) if CHANNEL else tl.sum(tl.zeros([C], tl.float32), 0)
    part = block.to(tl.int64) * tokens * H
    if dg is not None:
        if end < row_end:
            S = load_memory(memory + (s.to(tl.int64) * H + H + h) * K * V, column, K, V, BK, BV)
        else:
            S = load_memory(final + (r * H + h) * K * V, column, K, V, BK, BV)
        crossing = tl.sum(S * D, 1) if CHANNEL else tl.sum(tl.sum(S * D, 1), 0)
        qdq += (part + h) * K if CHANNEL else part
        dg += (part + h) * K if CHANNEL else part
    q += h // G * K
    k += h // G * K
    v += h * V
    do += h * V
    dk += (part + h) * K
    dv += h * V
    if dks is not None:
        dks += part
    if dvs is not None:
        dvs += part
    chunks = tl.cdiv(end - begin, C)
    for n in tl.range(chunks, num_stages=STAGES):
        start = begin + (chunks - 1 - n) * C
        if CHANNEL:
            logs = load_logs(g, start, end, h, H, G, K, C, BK)
            if is_mild(logs, PRECISION):
                D, crossing = mild_key_value_chunk(
                    D, crossing, q, k, v, logs, qs, ks, vs, do, dk, dv, dks, dvs, qdq, dg, start, end, h, H,
                    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, DOT, PRECISION,
                )  # fmt: skip
            else:
                pieces = tl.cdiv(tl.minimum(C, end - start), 16)
                for piece in range(pieces):
                    D, crossing = key_value_chunk(
                        D, crossing, q, k, v, g, qs, ks, vs, do, dk, dv, dks, dvs, qdq, dg, start + (pieces - 1 - piece) * 16, end, h, H, G,
                        q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, 16, BK, BV, True, DOT, PRECISION,
                    )  # fmt: skip
        else:
            D, crossing = key_value_chunk(
                D, crossing, q, k, v, g, qs, ks, vs, do, dk, dv, dks, dvs, qdq, dg, start, end, h, H, G,
                q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, False, DOT, PRECISION,
            )  # fmt: skip


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
