"""The ``decay`` family's forward kernels.

Three launches. `contribution_kernel` gives what each segment alone writes; `scan_kernel` turns that into the memory before each segment;
`output_kernel` walks through each segment once more and reads. With g the running sum of log decays inside a chunk, S the memory before it:

    o_i = scale · (exp(g_i)·q_i)ᵀ S + scale · Σ_{j≤i} (q_iᵀ k_j exp(g_i − g_j)) v_j
    S'  = exp(g_C)·S + Σ_j (exp(g_C − g_j)·k_j) v_jᵀ

Every exponent is ≤ 0, and with a decay per head the sum over j is one masked product. With a decay per channel it is one, too, where no
channel forgets too much inside a chunk (`is_mild`): with γ half of g_C, every channel's own,

    exp(g_i − g_j) = exp(g_i − γ)·exp(γ − g_j)        o_i = scale · (exp(g_i − γ)·q_i)ᵀ (exp(γ)·S) + scale · Σ_{j≤i} (…) v_j

so that the memory is read, and written, with the same two tiles as the scores. Any other chunk is walked through by 16 tokens at a time,
whose scores are summed channel by channel. Which way it goes is decided on the device, chunk by chunk.
"""

from __future__ import annotations

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
    store_tile,
)
from fastweights.ops.launch_triton import compiled_together, launch
from fastweights.ops.tiles_triton import padded


@triton.jit
def load_decay(g, start, end, h, H, G, K, C: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr):
    """The decays of a chunk, from the logs g.

    Returns those since the chunk's start and those from each token to the end, made to multiply ``[C, K]``; that of the whole, made to
    multiply a memory ``[K, V]``; and its log, a number or ``[K]``. Last the running sum of logs in two parts, which keep all digits where a
    −50 stands among small numbers: multiples of 1/16, whose sums are exact, and the rest, whose sums stay small.
    """
    if CHANNEL:  # noqa: SIM108
        x = load_tile(g + (h // G) * K, start, end, (H // G) * K, 0, K, C, BK)
    else:
        x = load_numbers(g, start, end, H, h, 0.0, C)
    x = tl.maximum(x, -1e4)  # exp is 0 there, and −∞ − (−∞) would be no number
    coarse = tl.floor(x * 16.0) * 0.0625
    fine = x - coarse
    total_coarse = tl.sum(coarse, 0)
    total_fine = tl.sum(fine, 0)
    coarse = tl.cumsum(coarse, 0)
    fine = tl.cumsum(fine, 0)
    total = total_coarse + total_fine
    since = tl.exp(coarse + fine)
    if CHANNEL:
        keep = tl.exp((total_coarse[None, :] - coarse) + (total_fine[None, :] - fine))
        carry = tl.exp(total)[:, None]
    else:
        keep = tl.exp((total_coarse - coarse) + (total_fine - fine))[:, None]
        carry = tl.exp(total)
        since = since[:, None]
    return since, keep, carry, total, coarse, fine


@triton.jit
def load_scaled(base, numbers, start, end, stride, heads, h, H, column, width, C: tl.constexpr, W: tl.constexpr):
    """A tile of tokens in float32, each times its number (of ``heads`` for H heads) if there are numbers."""
    x = load_tile(base, start, end, stride, column, width, C, W).to(tl.float32)
    return x * load_numbers(numbers, start, end, heads, h * heads // H, 1.0, C)[:, None]


@triton.jit
def load_logs(g, start, end, h, H, G, K, C: tl.constexpr, BK: tl.constexpr):
    """A chunk's log decays per channel ``[C, K]``, 0 past its end; no lower than where exp is 0, as in `load_decay`."""
    return tl.maximum(load_tile(g + (h // G) * K, start, end, (H // G) * K, 0, K, C, BK), -1e4)


@triton.jit
def is_mild(logs, PRECISION: tl.constexpr):
    """Whether `halves` may be used: the chunk's log decay is above a bound in every channel.

    With half of it as the exponent, factors stay within exp(±32), and scores that are masked afterwards below infinity. An exponent of 8
    is known to 8e-7, as good as the sums of a product in float32, and one of 32, of a plain running sum, to 2e-5, better than tf32 or
    bfloat16.
    """
    bound = -16.0 if PRECISION == "tf32x3" else -64.0
    return tl.min(tl.sum(logs, 0), 0) > bound


@triton.jit
def halves(logs, PRECISION: tl.constexpr):
    """``exp(g_i − γ)``, ``exp(γ − g_i)`` ``[C, K]`` and ``exp(γ)`` ``[K]``, γ half of the chunk's log decay, which no padding changes."""
    if PRECISION == "tf32x3":  # in two parts, as in `load_decay`
        coarse = tl.floor(logs * 16.0) * 0.0625
        fine = logs - coarse
        half_coarse = tl.sum(coarse, 0) * 0.5
        half_fine = tl.sum(fine, 0) * 0.5
        half = half_coarse + half_fine
        x = (tl.cumsum(coarse, 0) - half_coarse[None, :]) + (tl.cumsum(fine, 0) - half_fine[None, :])
    else:
        half = tl.sum(logs, 0) * 0.5
        x = tl.cumsum(logs, 0) - half[None, :]
    return tl.exp(x), tl.exp(-x), tl.exp(half)


@triton.jit
def channel_weights(g, start, end, h, H, G, K, C: tl.constexpr, BK: tl.constexpr, SINCE: tl.constexpr, PRECISION: tl.constexpr):
    """The decays per channel since a chunk's start, or those from each token to its end; a running sum in two parts only where needed."""
    logs = load_logs(g, start, end, h, H, G, K, C, BK)
    if is_mild(logs, PRECISION):
        up, down, half = halves(logs, PRECISION)
        weights = (up if SINCE else down) * half[None, :]
    else:
        since, keep, _carry, _all, _c, _f = load_decay(g, start, end, h, H, G, K, C, BK, True)
        weights = since if SINCE else keep
    return weights


@triton.jit
def causal(P, C: tl.constexpr):
    """P for j ≤ i, else 0; never by a product, for what is masked may be large."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], P, 0.0)


@triton.jit
def row(x, j, C: tl.constexpr):
    """Row j of ``[C, K]`` in registers."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == j, x, 0.0), 0)


@triton.jit
def from_row(coarse, fine, j, C: tl.constexpr):
    """``exp(g_i − g_j)`` per channel ``[C, K]``; 1 for i < j, where it is not looked at."""
    return tl.exp(tl.minimum((coarse - row(coarse, j, C)[None, :]) + (fine - row(fine, j, C)[None, :]), 0.0))


@triton.jit
def channel_scores(q, k, coarse, fine, C: tl.constexpr):
    """``P[i, j] = Σ_κ q_iκ k_jκ exp(g_iκ − g_jκ)`` for j ≤ i, else 0."""
    i = tl.arange(0, C)
    P = tl.zeros([C, C], tl.float32)
    for j in range(C):
        column = tl.sum(q * row(k, j, C)[None, :] * from_row(coarse, fine, j, C), 1)
        P = tl.where(i[None, :] == j, column[:, None], P)
    return causal(P, C)


@triton.jit
def scan_kernel(
    memory, total, state, final, first, T, L, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """In place: what each segment writes ``[segments, H, K, V]`` becomes the memory before it (REVERSE: the gradient of that after it)."""
    column = tl.program_id(1) * BV
    key = tl.program_id(2) * BK
    r = tl.program_id(0) // H
    h = tl.program_id(0) % H
    begin, count = segments_of_row(r, first, T, L)
    i = key + tl.arange(0, BK)
    c = column + tl.arange(0, BV)
    mask = (i < K)[:, None] & (c < V)[None, :]
    place = i[:, None] * V + c[None, :]
    S = tl.zeros([BK, BV], tl.float32) if state is None else tl.load(state + (r.to(tl.int64) * H + h) * K * V + place, mask=mask, other=0.0)
    for n in tl.range(count, num_stages=4):
        s = (begin + (count - 1 - n if REVERSE else n)) * H + h
        written = tl.load(memory + s * K * V + place, mask=mask, other=0.0)
        keep = tl.exp(tl.load(total + s * K + i, mask=i < K, other=0.0))[:, None] if CHANNEL else tl.exp(tl.load(total + s))
        tl.store(memory + s * K * V + place, S, mask=mask)
        S = keep * S + written
    tl.store(final + (r.to(tl.int64) * H + h) * K * V + place, S, mask=mask)


@triton.jit
def contribution_kernel(
    k, v, g, ks, vs, out, total, table, T, L, H, G, k_stride, v_stride, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr,
    CHANNEL: tl.constexpr, REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a segment alone adds to the memory after it; REVERSE (k, v are q, do): to the gradient of the memory before it."""
    pid = tl.program_id(0)
    block = pid % NB
    h = pid // NB % H
    s = pid // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    k += h // G * K
    v += h * V
    S = tl.zeros([BK, BV], tl.float32)
    passed = tl.zeros([BK], tl.float32) if CHANNEL else tl.sum(tl.zeros([C], tl.float32), 0)
    for start in tl.range(begin, end, C, num_stages=STAGES):
        x = load_tile(k, start, end, k_stride, 0, K, C, BK).to(tl.float32)
        y = load_tile(v, start, end, v_stride, block * BV, V, C, BV).to(tl.float32)
        x *= load_numbers(ks, start, end, ks_heads, h * ks_heads // H, 1.0, C)[:, None]
        y *= load_numbers(vs, start, end, vs_heads, h * vs_heads // H, 1.0, C)[:, None]
        if CHANNEL:
            x *= channel_weights(g, start, end, h, H, G, K, C, BK, REVERSE, PRECISION)
            all_a = tl.sum(load_logs(g, start, end, h, H, G, K, C, BK), 0)
            if REVERSE:
                x *= tl.exp(passed)[None, :]
            else:
                S *= tl.exp(all_a)[:, None]
        else:
            since, keep, carry, all_a, _c, _f = load_decay(g, start, end, h, H, G, K, C, BK, False)
            if REVERSE:
                x *= since * tl.exp(passed)
            else:
                x *= keep
                S *= carry
        S += tl.dot(tl.trans(x.to(DOT)), y.to(DOT), input_precision=PRECISION)
        passed += all_a
    base = s.to(tl.int64) * H + h
    store_memory(out + base * K * V, S * scale, block * BV, K, V, BK, BV)
    if total is not None and block == 0:
        if CHANNEL:
            i = tl.arange(0, BK)
            tl.store(total + base * K + i, passed, mask=i < K)
        else:
            tl.store(total + base, passed)


@triton.jit
def output_chunk(
    S, q, k, v, g, qs, ks, vs, o, start, end, h, H, G, q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Read in one chunk; returns the memory after it."""
    x = load_scaled(k, ks, start, end, k_stride, ks_heads, h, H, 0, K, C, BK)
    y = load_scaled(v, vs, start, end, v_stride, vs_heads, h, H, column, V, C, BV)
    z = load_scaled(q, qs, start, end, q_stride, qs_heads, h, H, 0, K, C, BK)
    since, keep, carry, _all, coarse, fine = load_decay(g, start, end, h, H, G, K, C, BK, CHANNEL)
    if CHANNEL:
        P = channel_scores(z, x, coarse, fine, C)
    else:
        P = tl.dot(z.to(DOT), tl.trans(x.to(DOT)), input_precision=PRECISION) * decay_matrix(coarse, fine, C)
    out = tl.dot((z * since).to(DOT), S.to(DOT), input_precision=PRECISION)
    out += tl.dot(P.to(DOT), y.to(DOT), input_precision=PRECISION)
    store_tile(o, out * scale, start, end, H * V, column, V, C, BV)
    x *= keep
    return S * carry + tl.dot(tl.trans(x.to(DOT)), y.to(DOT), input_precision=PRECISION)


@triton.jit
def mild_output_chunk(
    S, q, k, v, logs, qs, ks, vs, o, start, end, h, H, q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same where `is_mild` of the chunk's log decays."""
    up, down, half = halves(logs, PRECISION)
    x = (load_scaled(k, ks, start, end, k_stride, ks_heads, h, H, 0, K, C, BK) * down).to(DOT)
    z = (load_scaled(q, qs, start, end, q_stride, qs_heads, h, H, 0, K, C, BK) * up).to(DOT)
    y = load_scaled(v, vs, start, end, v_stride, vs_heads, h, H, column, V, C, BV).to(DOT)
    P = causal(tl.dot(z, tl.trans(x), input_precision=PRECISION), C)
    S *= half[:, None]
    out = tl.dot(z, S.to(DOT), input_precision=PRECISION)
    out += tl.dot(P.to(DOT), y, input_precision=PRECISION)
    store_tile(o, out * scale, start, end, H * V, column, V, C, BV)
    return (S + tl.dot(tl.trans(x), y, input_precision=PRECISION)) * half[:, None]


@triton.jit
def output_kernel(
    q, k, v, g, qs, ks, vs, memory, o, table, T, L, H, G, q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NB: tl.constexpr, CHANNEL: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Read while walking through a segment; the program holds BV columns of the memory."""
    pid = tl.program_id(0)
    column = pid % NB * BV
    h = pid // NB % H
    s = pid // NB // H
    _, begin, end, _ = segment_of(s, table, T, L)
    S = load_memory(memory + (s.to(tl.int64) * H + h) * K * V, column, K, V, BK, BV)
    q += h // G * K
    k += h // G * K
    v += h * V
    o += h * V
    for start in tl.range(begin, end, C, num_stages=STAGES):
        if CHANNEL:
            logs = load_logs(g, start, end, h, H, G, K, C, BK)
            if is_mild(logs, PRECISION):
                S = mild_output_chunk(
                    S, q, k, v, logs, qs, ks, vs, o, start, end, h, H,
                    q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, DOT, PRECISION,
                )  # fmt: skip
            else:
                for few in range(start, tl.minimum(start + C, end), 16):
                    S = output_chunk(
                        S, q, k, v, g, qs, ks, vs, o, few, end, h, H, G,
                        q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, 16, BK, BV, True, DOT, PRECISION,
                    )  # fmt: skip
        else:
            S = output_chunk(
                S, q, k, v, g, qs, ks, vs, o, start, end, h, H, G,
                q_stride, k_stride, v_stride, qs_heads, ks_heads, vs_heads, scale, column, K, V, C, BK, BV, False, DOT, PRECISION,
            )  # fmt: skip


def heads_in(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[2]


def tile_side(size: int, dot: tl.dtype) -> int:
    """The power of two that holds ``size``; in bfloat16 at least 64, a row of 128 bytes.

    Tiles of shorter rows are swizzled in another way, and where tiles of two ways follow each other at one shared address, ptxas 12.8.93
    (Triton 3.6) takes the wrong register for the second's descriptor: wrong numbers, or an illegal address (docs/kernels.md).
    """
    return max(64 if dot == tl.bfloat16 else 16, padded(size))


def contributions(k, v, g, ks, vs, cut: Segments, tile: Tile, *, reverse: bool, scale: float = 1.0, total: Tensor | None = None) -> Tensor:
    """``[segments, Hv, K, V]``; also fills ``total``, each segment's log decay, if it is given."""
    (_, T, Hk, K), (Hv, V) = k.shape, v.shape[2:]
    DOT, precision = dot_type(k.dtype, v.dtype)
    BV = tile_side(min(V, tile.columns), DOT)
    blocks = triton.cdiv(V, BV)
    out = torch.empty(cut.number, Hv, K, V, dtype=torch.float32, device=k.device)
    launch(
        contribution_kernel, (cut.number * Hv * blocks,),
        k, v, g, ks, vs, out, total, cut.table, T, cut.length, Hv, Hv // Hk, k.stride(1), v.stride(1), heads_in(ks), heads_in(vs), scale,
        K=K, V=V, C=tile.chunk, BK=tile_side(K, DOT), BV=BV, NB=blocks, CHANNEL=g is not None and g.dim() == 4, REVERSE=reverse,
        DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def scan(memory: Tensor, total: Tensor, state: Tensor | None, T: int, cut: Segments, *, reverse: bool) -> Tensor:
    """Run the scan in place over ``memory``; returns what is left after the last segment ``[R, H, K, V]``."""
    _, H, K, V = memory.shape
    final = torch.empty(cut.rows, H, K, V, dtype=torch.float32, device=memory.device)
    BV = min(padded(V), 128)
    BK = 512 // BV
    launch(
        scan_kernel, (cut.rows * H, triton.cdiv(V, BV), triton.cdiv(K, BK)),
        memory, total, state, final, cut.first, T, cut.length, H, K, V,
        BK=BK, BV=BV, CHANNEL=total.dim() == 3, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return final


@compiled_together
def forward(q, k, v, g, qs, ks, vs, state, cut: Segments, tile: Tile, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``o``, the final state, the memory before each segment, and each segment's total log decay. T ≥ 1."""
    (B, T, Hk, K), (Hv, V) = k.shape, v.shape[2:]
    channel = g is not None and g.dim() == 4
    total = torch.empty(cut.number, Hv, *([K] if channel else []), dtype=torch.float32, device=k.device)
    memory = contributions(k, v, g, ks, vs, cut, tile, reverse=False, total=total)
    final = scan(memory, total, state, T, cut, reverse=False)
    DOT, precision = dot_type(q.dtype, k.dtype, v.dtype)
    BV = tile_side(min(V, tile.columns), DOT)
    blocks = triton.cdiv(V, BV)
    o = torch.empty(B, T, Hv, V, dtype=v.dtype, device=v.device)
    launch(
        output_kernel, (cut.number * Hv * blocks,),
        q, k, v, g, qs, ks, vs, memory, o, cut.table, T, cut.length, Hv, Hv // Hk,
        q.stride(1), k.stride(1), v.stride(1), heads_in(qs), heads_in(ks), heads_in(vs), scale,
        K=K, V=V, C=tile.chunk, BK=tile_side(K, DOT), BV=BV, NB=blocks, CHANNEL=channel,
        DOT=DOT, PRECISION=precision, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return o, final, memory, total
