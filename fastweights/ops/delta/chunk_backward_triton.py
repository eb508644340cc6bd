"""The ``delta`` family's backward kernels. Letters as in `chunk_forward_triton`; dU, dR, dS are gradients of U, of X (before β), of S.

The forward's walk is repeated to get the memory before each chunk and U. `reverse_kernel` then goes through the chunks from the last to the
first with dSᵀ in registers, as the forward does with Sᵀ:

    dU = scale · Pᵀ do + exp(g_C − g) ∘ (K̂ dS')          dR = L⁻ᵀ dU
    dS = exp(g_C) dS' + scale · Q̂ᵀ (exp(g) ∘ do) − K̂ᵀ (β exp(g) ∘ dR)

and `gradient_kernel` makes all the rest of one chunk, every chunk at once. Two [C, C] products carry everything inside a chunk:
E = (do Uᵀ) for the scores and F = −(dR Uᵀ) for A, both under the decays. A gate's gradient is a sum over what passes it: pairs of a
token j before it and i after (or at) it, the old memory read after it, writes before it that reach the chunk's end, and the old memory
at the end. Only these are summed, so a gate that shuts (−50) gets its gradient of e^−50 and not the noise of what does not pass it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.delta.chunk_forward_triton import RATES, Plan, Tiles, decays, heads_of, join, numbers, plan, walk
from fastweights.ops.launch_triton import launch
from fastweights.ops.tiles_triton import Pieces, first_piece, locate, padded


@triton.jit
def reverse_kernel(
    q, k, do, inverse, scores, rates, start, dstart, dstates, dr, owner, bounds, T, SEGMENT, H, G, K, V,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, RATES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go back through one segment with BV columns of dS.

    With ``dstates``: keep the gradient of the memory after each chunk ``[chunks, H, K, V]`` and dR ``[B, T, H, V]``, and leave that of the
    row's first memory in ``dstart [R, H, K, V]``. Without: only what the segment itself adds, into ``dstart [segments, H, K, V]``.
    """
    DOT: tl.constexpr = inverse.dtype.element_ty
    tile = tl.program_id(0) % NV
    h = tl.program_id(0) // NV % H
    segment = (tl.program_id(0) // NV // H).to(tl.int64)
    row, batch, first, last, begin, stop = locate(segment, owner, bounds, T, SEGMENT)
    if (first >= stop) & (first > begin):
        return
    kk = tl.arange(0, BK)
    vv = tile * BV + tl.arange(0, BV)
    i = tl.arange(0, C)
    inside = (kk < K)[None, :] & (vv < V)[:, None]
    place = kk[None, :] * V + vv[:, None]
    dS = tl.zeros([BV, BK], tl.float32)
    if start is not None:
        dS = tl.load(start + (segment * H + h) * K * V + place, mask=inside, other=0.0)

    chunk = first_piece(row, bounds, T, C) + (first - begin) // C
    k += batch * k_batch + h // G * k_head + first * k_token
    q += batch * q_batch + h // G * q_head + first * q_token
    token = (batch * T + first) * H + h
    length = (last - first).to(tl.int32)
    count = tl.cdiv(length, C)
    square = i[:, None] * C + i[None, :]
    for back in tl.range(0, count, num_stages=STAGES):
        n = count - 1 - back
        base = (chunk + n) * H + h
        past = first * 0 + n * C  # int64
        t = tl.minimum(i, length - n * C - 1)  # tokens past the end count for nothing: their rates are 0
        number = rates + base * RATES * C + i
        keys = tl.load(k + past * k_token + (t[:, None] * k_token + kk[None, :]), mask=(kk < K)[None, :], other=0.0).to(DOT)
        queries = tl.load(q + past * q_token + (t[:, None] * q_token + kk[None, :]), mask=(kk < K)[None, :], other=0.0).to(DOT)
        L = tl.load(inverse + base * C * C + square)
        P = tl.load(scores + base * C * C + square)
        there = (token + past * H) * V
        dout = tl.load(do + there + (t[None, :] * (H * V) + vv[:, None]), mask=(vv < V)[:, None], other=0.0).to(DOT)
        keep = tl.load(rates + base * RATES * C + 9 * C + tl.zeros([BK], tl.int32))
        now = dS.to(DOT)
        dU = tl.dot(now, tl.trans(keys), input_precision=PRECISION) * tl.load(number + 2 * C)[None, :]
        dU = tl.dot(dout, P, dU, input_precision=PRECISION)
        dR = tl.dot(dU.to(DOT), L, input_precision=PRECISION)
        if dstates is not None:
            tl.store(dstates + base * K * V + place, now, mask=inside)
            live = (i < length - n * C)[None, :] & (vv < V)[:, None]
            tl.store(dr + there + (i[None, :] * (H * V) + vv[:, None]), dR.to(DOT), mask=live)
        read = (dout.to(tl.float32) * tl.load(number + 3 * C)[None, :]).to(DOT)
        dS = tl.dot(read, queries, dS * keep[None, :], input_precision=PRECISION)
        dS = tl.dot((dR * -tl.load(number + C)[None, :]).to(DOT), keys, dS, input_precision=PRECISION)

    if dstates is None:
        tl.store(dstart + (segment * H + h) * K * V + place, dS, mask=inside)
    elif first == begin:
        tl.store(dstart + (row * H + h) * K * V + place, dS, mask=inside)


@triton.jit
def add_up(base, x, tile, tokens, number, H, h, live):
    """Keep one number a token of this tile of keys, in ``[tiles, tokens, H]``; nothing where nobody asked."""
    if base is not None:
        tl.store(base + (tile * tokens + number) * H + h, x, mask=live)


@triton.jit
def gradient_kernel(
    q, k, v, do, update, dr, states, dstates, rates, beta, vs, dq, dk, dv, dbeta, dg, dks, dvs, dqs, owner, bounds, tokens, T, H, G, K, V,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, vs_heads, scale,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NK: tl.constexpr, RATES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk and value head, BK columns of q and k: dq, dk ``[B, T, H, K]``, dv, and numbers a token ``[NK, B, T, H]``."""
    DOT: tl.constexpr = states.dtype.element_ty
    tile = (tl.program_id(0) % NK).to(tl.int64)
    h = tl.program_id(0) // NK % H
    chunk = (tl.program_id(0) // NK // H).to(tl.int64)
    _, batch, first, last, _, _ = locate(chunk, owner, bounds, T, C)
    if first >= last:
        return
    i = tl.arange(0, C)
    t = first + i
    live = t < last
    number = batch * T + t
    kk = tile.to(tl.int32) * BK + tl.arange(0, BK)
    base = chunk * H + h
    keyed = live[:, None] & (kk < K)[None, :]
    factor = rates + base * RATES * C + i
    coarse = tl.load(factor + 7 * C)
    fine = tl.load(factor + 8 * C)
    all_coarse = tl.load(rates + base * RATES * C + 8 * C - 1)
    all_fine = tl.load(rates + base * RATES * C + 9 * C - 1)
    left = tl.exp(coarse + fine)
    to_end = tl.exp((all_coarse - coarse) + (all_fine - fine))
    b = numbers(beta, number, H, h, H, live, 1.0)
    bv = tl.load(factor)
    qscale = tl.load(factor + 4 * C)
    kscale = tl.load(factor + 5 * C)

    E = tl.zeros([C, C], tl.float32)
    F = tl.zeros([C, C], tl.float32)
    from_read = tl.zeros([C, BK], tl.float32)  # do Sᵀ
    from_error = tl.zeros([C, BK], tl.float32)  # dR Sᵀ
    from_write = tl.zeros([C, BK], tl.float32)  # U dS'ᵀ
    passed = tl.zeros([BK], tl.float32)  # ⟨S, dS'⟩, row by row
    read_value = tl.zeros([C], tl.float32)  # dR·v
    for start in tl.range(0, V, BV, num_stages=STAGES):
        vv = start + tl.arange(0, BV)
        there = (number * H + h)[:, None] * V + vv[None, :]
        valued = live[:, None] & (vv < V)[None, :]
        memory = base * K * V + kk[:, None] * V + vv[None, :]
        inside = (kk < K)[:, None] & (vv < V)[None, :]
        S = tl.load(states + memory, mask=inside, other=0.0)
        dS = tl.load(dstates + memory, mask=inside, other=0.0)
        U = tl.load(update + there, mask=valued, other=0.0)
        dR = tl.load(dr + there, mask=valued, other=0.0)
        dout = tl.load(do + there, mask=valued, other=0.0).to(DOT)
        E = tl.dot(dout, tl.trans(U), E, input_precision=PRECISION)
        F = tl.dot(dR, tl.trans(U), F, input_precision=PRECISION)
        from_read = tl.dot(dout, tl.trans(S), from_read, input_precision=PRECISION)
        from_error = tl.dot(dR, tl.trans(S), from_error, input_precision=PRECISION)
        from_write = tl.dot(U, tl.trans(dS), from_write, input_precision=PRECISION)
        passed += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        if tile == 0:
            values = tl.load(v + batch * v_batch + h * v_head + t[:, None] * v_token + vv[None, :], mask=valued, other=0.0)
            read_value += tl.sum(dR.to(tl.float32) * values.to(tl.float32), 1)
            tl.store(dv + there, (dR.to(tl.float32) * bv[:, None]).to(dv.dtype.element_ty), mask=valued)

    keys = tl.load(k + batch * k_batch + h // G * k_head + t[:, None] * k_token + kk[None, :], mask=keyed, other=0.0).to(DOT)
    queries = tl.load(q + batch * q_batch + h // G * q_head + t[:, None] * q_token + kk[None, :], mask=keyed, other=0.0).to(DOT)
    x = keys.to(tl.float32)
    y = queries.to(tl.float32)
    under = decays(rates + base * RATES * C, C)
    below = i[:, None] > i[None, :]
    E *= under
    F = tl.where(below, -F * under, 0.0)
    from_read *= left[:, None]
    from_error *= -left[:, None]
    from_write *= to_end[:, None]
    if dg is not None:
        pairs = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * tl.where(below, E * qscale[:, None], 0.0)
        pairs += tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * F * (b * kscale)[:, None]
        before = tl.where(i[:, None] < i[None, :], 1.0, 0.0).to(DOT)
        passing = tl.dot((pairs * kscale[None, :]).to(DOT), before, input_precision=PRECISION)  # [i, t]: pairs (i, j) with j < t
        passing += (tl.sum(from_read * y, 1) * qscale + tl.sum(from_error * x, 1) * b * kscale)[:, None]
        written = tl.sum(from_write * x, 1) * kscale
        at_end = tl.exp(all_coarse + all_fine) * tl.sum(passed, 0)
        gate = tl.sum(tl.where(i[:, None] >= i[None, :], passing, written[:, None]), 0) + at_end
        add_up(dg, gate, tile, tokens, number, H, h, live)
    from_error = tl.dot((F * kscale[None, :]).to(DOT), keys, from_error, input_precision=PRECISION)  # before β
    from_read = tl.dot((E * kscale[None, :]).to(DOT), keys, from_read, input_precision=PRECISION)
    from_write = tl.dot(tl.trans((E * qscale[:, None]).to(DOT)), queries, from_write, input_precision=PRECISION)
    from_write = tl.dot(tl.trans((F * (b * kscale)[:, None]).to(DOT)), keys, from_write, input_precision=PRECISION)

    place = (number * H + h)[:, None] * K + kk[None, :]
    tl.store(dq + place, (from_read * qscale[:, None]).to(dq.dtype.element_ty), mask=keyed)
    tl.store(dk + place, ((from_error * b[:, None] + from_write) * kscale[:, None]).to(dk.dtype.element_ty), mask=keyed)
    derror = tl.sum(from_error * x, 1)
    v_scale = numbers(vs, number, vs_heads, h, H, live, 1.0)
    add_up(dqs, tl.sum(from_read * y, 1) * scale, tile, tokens, number, H, h, live)
    add_up(dks, derror * b + tl.sum(from_write * x, 1), tile, tokens, number, H, h, live)
    add_up(dvs, b * read_value, tile, tokens, number, H, h, live)
    add_up(dbeta, v_scale * read_value + kscale * derror, tile, tokens, number, H, h, live)


def backward(
    q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale: float, tiles: Tiles, do, dfinal, inverse, scores, rates, starts, maps
):
    """Gradients in the order of the operands q … state; None for a coefficient that is None. The state's is always there."""
    (B, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    way = plan(q, k, v, cu_seqlens, tiles)
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = torch.empty(way.chunks.total, H, K, V, dtype=way.dot, device=k.device)
    update = torch.empty(B, T, H, V, dtype=way.dot, device=k.device)
    start, pieces = (starts, way.segments) if starts.numel() else (state, way.whole)
    walk(q, k, v, inverse, None, rates, cu_seqlens, way, pieces, start=start, states=states, update=update)

    dstate = rates.new_empty(rows, H, K, V)
    if way.split:
        own = rates.new_empty(way.segments.total, H, K, V)
        reverse(q, k, do, inverse, scores, rates, cu_seqlens, way, way.segments, dstart=own)
        dfinal = join(maps, dfinal, cu_seqlens, way, T, rows, V, starts=own)
    dstates, dr = torch.empty_like(states), torch.empty_like(update)
    pieces = way.segments if way.split else way.whole
    reverse(q, k, do, inverse, scores, rates, cu_seqlens, way, pieces, start=dfinal, dstart=dstate, dstates=dstates, dr=dr)

    BK, BV = min(padded(K), tiles.gradient_keys), min(padded(V), tiles.gradient_columns)
    NK = triton.cdiv(K, BK)
    wide = q.dtype if Hk == H else torch.float32
    dq, dk = (torch.empty(B, T, H, K, dtype=wide, device=k.device) for _ in range(2))
    dv = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    dbeta, dg, dks, dvs, dqs = (None if x is None else rates.new_empty(NK, B, T, H) for x in (beta, log_decay, ks, vs, qs))
    launch(
        gradient_kernel, (way.chunks.total * H * NK,),
        q, k, v, do, update, dr, states, dstates, rates, beta, vs, dq, dk, dv, dbeta, dg, dks, dvs, dqs, way.chunks.owner, cu_seqlens,
        B * T, T, H, H // Hk, K, V, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads_of(vs), scale,
        C=tiles.chunk, BK=BK, BV=BV, NK=NK, RATES=RATES,
        PRECISION=way.precision, STAGES=tiles.gradient_stages, num_warps=tiles.gradient_warps,
    )  # fmt: skip

    def of_heads(x: Tensor | None, like: Tensor | None) -> Tensor | None:
        """Sum the tiles of keys, then the value heads that share one number."""
        if x is None or like is None:
            return None
        x = x[0] if NK == 1 else x.sum(0)
        return x if like.shape[2] == H else x.unflatten(2, (like.shape[2], -1)).sum(3)

    if Hk != H:
        dq, dk = (x.unflatten(2, (Hk, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, of_heads(dbeta, beta), of_heads(dg, log_decay), of_heads(dks, ks), of_heads(dvs, vs), of_heads(dqs, qs), dstate


def reverse(
    q, k, do, inverse, scores, rates, cu_seqlens, way: Plan, pieces: Pieces, *, start=None, dstart=None, dstates=None, dr=None
) -> None:
    (_, T, Hk, K), (H, V) = k.shape, do.shape[2:]
    BV = min(padded(V), way.tiles.columns)
    NV = triton.cdiv(V, BV)
    launch(
        reverse_kernel, (pieces.total * H * NV,),
        q, k, do, inverse, scores, rates, start, dstart, dstates, dr, pieces.owner, cu_seqlens, T, pieces.size, H, H // Hk, K, V,
        *q.stride()[:3], *k.stride()[:3], C=way.tiles.chunk, BK=padded(K), BV=BV, NV=NV, RATES=RATES,
        PRECISION=way.precision, STAGES=way.tiles.reverse_stages, num_warps=way.tiles.warps,
    )  # fmt: skip
