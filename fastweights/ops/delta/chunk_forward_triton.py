"""The ``delta`` family's forward kernels, and the walk that the backward repeats.

Inside a chunk of C tokens let g be the running sum of log decays, S the memory before the chunk, U the values it adds (one row a token):

    A[t, j] = β_t exp(g_t − g_j) k̂_tᵀk̂_j  for j < t        L = I + A
    X = β ∘ (V̂ − exp(g) ∘ K̂ S)                              U = L⁻¹ X
    o = scale · (exp(g) ∘ Q̂ S + P U),  P[t, j] = exp(g_t − g_j) q̂_tᵀk̂_j for j ≤ t
    S' = exp(g_C) S + K̂ᵀ (exp(g_C − g) ∘ U)

`prepare_kernel` makes L⁻¹ and P of all chunks at once, and folds the scales into numbers per token (``rates``), so that the walk multiplies
the keys as they came. `walk_kernel` goes through the chunks of a row with Sᵀ in registers, transposed so that each product's result is the
next one's left operand and never leaves the registers. Every exponent is ≤ 0.

Where rows and heads are too few to fill the card, rows are cut into segments. A chunk's map S → S' is affine, so a first walk gives each
segment's map M S + D (from S = I without values, and from S = 0 with them), `join_kernel` runs the maps one after the other, and a second
walk starts each segment right.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.launch_triton import launch
from fastweights.ops.tiles_triton import Pieces, cut, dithered, first_piece, locate, operand, padded, unit_lower_inverse

RATES = 10
"""Numbers kept per token and value head, in this order: the factor of v in X, of Sᵀk in X, of U in the write, of Sᵀq in o, of q, of k, of k
in A's rows; g's two parts; and what the chunk leaves of the memory, the same for every token. Past a row's end the factors are 0."""


@triton.jit
def numbers(base, token, heads, h, H, live, other):
    """One number a token for value head h, from ``[tokens, heads]`` (heads is Hk or Hv); ``other`` where there is none."""
    if base is None:
        return tl.where(live, other, other)
    else:
        return tl.load(base + token * heads + h * heads // H, mask=live, other=other)


@triton.jit
def decays(number, C: tl.constexpr):
    """``exp(g_t − g_j)`` for j ≤ t, else 0, from a chunk's rates.

    g comes as coarse + fine: sums of sixteenths are exact, so differences keep their digits next to a decay of −50.
    """
    i = tl.arange(0, C)
    coarse = tl.load(number + 7 * C + i)
    fine = tl.load(number + 8 * C + i)
    return tl.exp(tl.where(i[:, None] >= i[None, :], (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :]), -float("inf")))


@triton.jit
def rates_kernel(
    beta, log_decay, ks, vs, qs, rates, owner, bounds, T, H, ks_heads, vs_heads, qs_heads, scale,
    C: tl.constexpr, BH: tl.constexpr, NH: tl.constexpr, RATES: tl.constexpr,
):  # fmt: skip
    """The rates ``[chunks, H, RATES, C]`` of one chunk and up to BH value heads."""
    chunk = (tl.program_id(0) // NH).to(tl.int64)
    _, batch, first, last, _, _ = locate(chunk, owner, bounds, T, C)
    if first >= last:
        return
    i = tl.arange(0, C)[:, None]
    h = (tl.program_id(0) % NH * BH + tl.arange(0, BH))[None, :]
    token = batch * T + first + i
    live = (first + i < last) & (h < H)
    b = numbers(beta, token, H, h, H, live, 1.0)
    kscale = numbers(ks, token, ks_heads, h, H, live, 1.0)
    vscale = numbers(vs, token, vs_heads, h, H, live, 1.0)
    qscale = numbers(qs, token, qs_heads, h, H, live, 1.0) * scale
    log_a = tl.maximum(numbers(log_decay, token, H, h, H, live, 0.0), -1e4)  # exp is 0 there, and −∞ − (−∞) would be no number
    coarse = tl.floor(log_a * 16) / 16
    fine = log_a - coarse
    all_coarse = tl.sum(coarse, 0)[None, :]
    all_fine = tl.sum(fine, 0)[None, :]
    coarse = tl.cumsum(coarse, 0)
    fine = tl.cumsum(fine, 0)
    left = tl.exp(coarse + fine)
    to_end = tl.exp((all_coarse - coarse) + (all_fine - fine))

    row = rates + (chunk * H + h) * RATES * C + i
    inside = (h < H) & (i >= 0)
    tl.store(row, tl.where(live, b * vscale, 0.0), mask=inside)
    tl.store(row + C, tl.where(live, b * left * kscale, 0.0), mask=inside)
    tl.store(row + 2 * C, tl.where(live, to_end * kscale, 0.0), mask=inside)
    tl.store(row + 3 * C, tl.where(live, left * qscale, 0.0), mask=inside)
    tl.store(row + 4 * C, tl.where(live, qscale, 0.0), mask=inside)
    tl.store(row + 5 * C, tl.where(live, kscale, 0.0), mask=inside)
    tl.store(row + 6 * C, tl.where(live, b * kscale, 0.0), mask=inside)
    tl.store(row + 7 * C, coarse, mask=inside)
    tl.store(row + 8 * C, fine, mask=inside)
    tl.store(row + 9 * C, tl.where(i >= 0, tl.exp(all_coarse + all_fine), 0.0), mask=inside)


@triton.jit
def prepare_kernel(
    q, k, rates, inverse, scores, owner, bounds, T, H, G, K, q_batch, q_token, q_head, k_batch, k_token, k_head,
    C: tl.constexpr, BK: tl.constexpr, RATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """L⁻¹ and P ``[chunks, H, C, C]`` of one chunk and value head."""
    h = tl.program_id(0) % H
    chunk = (tl.program_id(0) // H).to(tl.int64)
    _, batch, first, last, _, _ = locate(chunk, owner, bounds, T, C)
    if first >= last:
        return
    i = tl.arange(0, C)
    t = tl.minimum(i, (last - first - 1).to(tl.int32))  # tokens past the end count for nothing: their rates are 0
    k += batch * k_batch + h // G * k_head + first * k_token + t[:, None] * k_token
    q += batch * q_batch + h // G * q_head + first * q_token + t[:, None] * q_token
    gram = tl.zeros([C, C], tl.float32)
    P = tl.zeros([C, C], tl.float32)
    for start in tl.range(0, K, BK):
        kk = (start + tl.arange(0, BK))[None, :]
        x = tl.load(k + kk, mask=kk < K, other=0.0).to(inverse.dtype.element_ty)
        gram = tl.dot(x, tl.trans(x), gram, input_precision=PRECISION)
        y = tl.load(q + kk, mask=kk < K, other=0.0).to(x.dtype)
        P = tl.dot(y, tl.trans(x), P, input_precision=PRECISION)

    base = chunk * H + h
    number = rates + base * RATES * C
    square = base * C * C + i[:, None] * C + i[None, :]
    under = decays(number, C) * tl.load(number + 5 * C + i)[None, :]
    tl.store(scores + square, (P * under * tl.load(number + 4 * C + i)[:, None]).to(scores.dtype.element_ty))
    A = tl.where(i[:, None] > i[None, :], gram * under * tl.load(number + 6 * C + i)[:, None], 0.0)
    L = unit_lower_inverse(A, C)
    if inverse.dtype.element_ty == tl.bfloat16:
        L = dithered(L, C)
    tl.store(inverse + square, L.to(inverse.dtype.element_ty))


@triton.jit
def walk_kernel(
    q, k, v, inverse, scores, rates, start, o, final, states, update, kept, owner, bounds, T, SEGMENT, KEEP, H, G, K, V,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, NK: tl.constexpr, RATES: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through one segment with BV columns of the memory.

    With ``o``: read, and leave the memory after each row in ``final [R, H, K, V]``, that before every KEEP tokens in ``kept``, if given.
    With ``states``: keep the memory before each chunk ``[chunks, H, K, V]`` and U ``[B, T, H, V]``. With neither (NK > 0): the segment's
    map (M, D) into ``final [segments, H, K, K + V]``.
    """
    DOT: tl.constexpr = inverse.dtype.element_ty
    tile = tl.program_id(0) % (NV + NK)
    h = tl.program_id(0) // (NV + NK) % H
    segment = (tl.program_id(0) // (NV + NK) // H).to(tl.int64)
    row, batch, first, last, begin, stop = locate(segment, owner, bounds, T, SEGMENT)
    if (first >= stop) & (first > begin):
        return
    kk = tl.arange(0, BK)
    i = tl.arange(0, C)
    vv = tl.where(tile < NV, tile, tile - NV) * BV + tl.arange(0, BV)
    of_values = vv < tl.where(tile < NV, V, 0)
    inside = (kk < K)[None, :] & (vv < V)[:, None]
    place = kk[None, :] * V + vv[:, None]
    S = tl.zeros([BV, BK], tl.float32)
    if NK > 0:
        S = tl.where((tile >= NV) & (vv[:, None] == kk[None, :]), 1.0, S)
    elif start is not None:
        S = tl.load(start + (segment * H + h) * K * V + place, mask=inside, other=0.0)

    chunk = first_piece(row, bounds, T, C) + (first - begin) // C
    k += batch * k_batch + h // G * k_head + first * k_token
    q += batch * q_batch + h // G * q_head + first * q_token
    v += batch * v_batch + h * v_head + first * v_token
    token = (batch * T + first) * H + h
    length = (last - first).to(tl.int32)
    square = i[:, None] * C + i[None, :]
    first_kept = first_piece(row, bounds, T, KEEP)
    for n in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        base = (chunk + n) * H + h
        past = first * 0 + n * C  # int64
        t = tl.minimum(i, length - n * C - 1)  # tokens past the end count for nothing: their rates are 0
        number = rates + base * RATES * C + i
        keys = tl.load(k + past * k_token + (t[:, None] * k_token + kk[None, :]), mask=(kk < K)[None, :], other=0.0).to(DOT)
        values = tl.load(v + past * v_token + (t[None, :] * v_token + vv[:, None]), mask=of_values[:, None], other=0.0).to(tl.float32)
        L = tl.load(inverse + base * C * C + square)
        keep = tl.load(rates + base * RATES * C + 9 * C + tl.zeros([BK], tl.int32))
        now = S.to(DOT)
        if kept is not None:  # noqa: SIM102 - the compiler knows this, and not what follows
            if n * C % KEEP == 0:
                tl.store(kept + ((first_kept + n * C // KEEP) * H + h) * K * V + place, S, mask=inside)
        X = values * tl.load(number)[None, :] - tl.dot(now, tl.trans(keys), input_precision=PRECISION) * tl.load(number + C)[None, :]
        U = tl.dot(X.to(DOT), tl.trans(L), input_precision=PRECISION)
        if o is not None:
            queries = tl.load(q + past * q_token + (t[:, None] * q_token + kk[None, :]), mask=(kk < K)[None, :], other=0.0).to(DOT)
            P = tl.load(scores + base * C * C + square)
            out = tl.dot(now, tl.trans(queries), input_precision=PRECISION) * tl.load(number + 3 * C)[None, :]
            out = tl.dot(U.to(DOT), tl.trans(P), out, input_precision=PRECISION)
            there = o + (token + past * H) * V + (i[None, :] * (H * V) + vv[:, None])
            tl.store(there, out.to(o.dtype.element_ty), mask=(i < length - n * C)[None, :] & of_values[:, None])
        if states is not None:
            tl.store(states + base * K * V + place, now, mask=inside)
            there = update + (token + past * H) * V + (i[None, :] * (H * V) + vv[:, None])
            tl.store(there, U.to(DOT), mask=(i < length - n * C)[None, :] & of_values[:, None])
        write = (U * tl.load(number + 2 * C)[None, :]).to(DOT)
        S = tl.dot(write, keys, S * keep[None, :], input_precision=PRECISION)

    if NK > 0:
        columns = tl.where(tile < NV, V, K)
        there = final + (segment * H + h) * K * (K + V) + kk[None, :] * (K + V) + vv[:, None] + tl.where(tile < NV, K, 0)
        tl.store(there, S, mask=(kk < K)[None, :] & (vv < columns)[:, None])
    elif final is not None:
        last_one = kk < tl.where(last == stop, K, 0)
        tl.store(final + (row * H + h) * K * V + place, S, mask=last_one[None, :] & (vv < V)[:, None])


@triton.jit
def join_kernel(
    maps, start, starts, bounds, T, SEGMENT, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr, NV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The memory each segment starts from, ``starts [segments, H, K, V]``, given ``start [R, H, K, V]``: S ← M S + D from one to the next.

    REVERSE: the gradient that reaches each segment's end, given that of the row's end: S ← Mᵀ S + D from the last to the first, where
    ``starts`` holds each segment's own D.
    """
    tile = tl.program_id(0) % NV
    h = tl.program_id(0) // NV % H
    row = (tl.program_id(0) // NV // H).to(tl.int64)
    kk = tl.arange(0, BK)
    vv = tile * BV + tl.arange(0, BV)
    part = tl.arange(0, PART)
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    place = kk[:, None] * V + vv[None, :]
    segment = first_piece(row, bounds, T, SEGMENT)
    if bounds is None:
        count = tl.maximum(tl.cdiv(T, SEGMENT), 1)
    else:
        count = tl.maximum(tl.cdiv((tl.load(bounds + row + 1) - tl.load(bounds + row)).to(tl.int32), SEGMENT), 1)
    S = tl.zeros([BK, BV], tl.float32)
    if start is not None:
        S = tl.load(start + (row * H + h) * K * V + place, mask=inside, other=0.0)
    for n in range(count):
        base = (segment + (count - 1 - n if REVERSE else n)) * H + h
        M = maps + base * K * (K + V)
        here = starts + base * K * V
        if REVERSE:
            D = tl.load(here + place, mask=inside, other=0.0)
        else:
            D = tl.load(M + K + kk[:, None] * (K + V) + vv[None, :], mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(here + place, S, mask=inside)
        tl.debug_barrier()  # other threads of this program read the store above, a part at a time
        S = D
        for p in range(0, K, PART):
            some = p + part < K
            if REVERSE:
                m = tl.load(M + (p + part)[None, :] * (K + V) + kk[:, None], mask=some[None, :] & (kk < K)[:, None], other=0.0)
            else:
                m = tl.load(M + kk[:, None] * (K + V) + (p + part)[None, :], mask=some[None, :] & (kk < K)[:, None], other=0.0)
            s = tl.load(here + (p + part)[:, None] * V + vv[None, :], mask=some[:, None] & (vv < V)[None, :], other=0.0)
            S = tl.dot(m, s, S, input_precision="tf32x3")


class Tiles(NamedTuple):
    """How one call is cut up. A small table of these (`fastweights.ops.delta.chunk_triton.TILES`) stands in for autotuning."""

    chunk: int
    """C: 16, 32 or 64."""
    columns: int
    """Columns of the memory that one program of a walk holds, at most: a power of two, at least 16."""
    warps: int
    """Warps of a walk."""
    stages: int
    """Chunks whose loads a walk has in flight."""
    reverse_stages: int
    """The same for the backward's walk."""
    gradient_keys: int
    """Columns of q and k in one program of the gradient kernel, at most."""
    gradient_columns: int
    """Columns of v in one step of the gradient kernel, at most."""
    gradient_warps: int
    gradient_stages: int
    segment: int = 0
    """Tokens of a segment, a multiple of C; negative if only the backward's repeat of the walk may use them; 0 picks by the call's size."""


PROGRAMS = 256
"""Walks a call is split into where its rows and heads are fewer: about two for each multiprocessor of an H200."""
PARTS = 4
"""Fewest segments of a row that run at once. The maps cost twice the walk, so fewer do not pay; the backward's repeat needs no maps."""


def segment_size(rows: int, tokens: int, heads: int, values: int, tiles: Tiles) -> tuple[int, bool]:
    """Tokens of a segment (more than ``tokens`` where one is a row), and whether the forward and the gradient run them all at once."""
    whole = -(-(tokens + 1) // tiles.chunk) * tiles.chunk
    if tiles.segment:
        size = min(abs(tiles.segment), whole)
        return size, size <= tokens and tiles.segment > 0
    walks = rows * heads * -(-values // min(padded(values), tiles.columns))
    parts = min(PROGRAMS // max(walks, 1), tokens // (8 * tiles.chunk))
    return (whole, False) if parts < 2 else (-(-tokens // (parts * tiles.chunk)) * tiles.chunk, parts >= PARTS)


def operand_in_full(*dtypes: torch.dtype) -> tuple[torch.dtype, str]:
    """`operand`, but float32 multiplied in float32: tensor cores cut off what plain torch rounds, and where all keys are alike, from every
    product alike."""
    dot, precision = operand(*dtypes)
    return dot, "ieee" if precision == "tf32x3" else precision


class Plan(NamedTuple):
    """What every kernel of a call is told."""

    chunks: Pieces
    segments: Pieces
    whole: Pieces
    """One piece a row."""
    split: bool
    tiles: Tiles
    dot: torch.dtype
    precision: str


def plan(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, tiles: Tiles) -> Plan:
    B, T, H, V = v.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size, split = segment_size(rows, T, H, V, tiles)
    chunks, segments, whole = (cut(B, T, s, cu_seqlens) for s in (tiles.chunk, size, T + 1))
    return Plan(chunks, segments, whole, split, tiles, *operand_in_full(q.dtype, k.dtype, v.dtype))


def heads_of(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[2]


def forward(q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale: float, tiles: Tiles):
    """``o``, the final state; for the backward L⁻¹, P, the rates, and where rows have segments their starts and maps (else empty)."""
    (B, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    way = plan(q, k, v, cu_seqlens, tiles)
    C, chunks = tiles.chunk, way.chunks.total
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inverse = torch.empty(chunks, H, C, C, dtype=way.dot, device=k.device)
    scores = torch.empty_like(inverse)
    rates = torch.empty(chunks, H, RATES, C, dtype=torch.float32, device=k.device)
    BH = min(16, triton.next_power_of_2(H))
    launch(
        rates_kernel, (chunks * triton.cdiv(H, BH),),
        beta, log_decay, ks, vs, qs, rates, way.chunks.owner, cu_seqlens, T, H, *map(heads_of, (ks, vs, qs)), scale,
        C=C, BH=BH, NH=triton.cdiv(H, BH), RATES=RATES, num_warps=4,
    )  # fmt: skip
    launch(
        prepare_kernel, (chunks * H,),
        q, k, rates, inverse, scores, way.chunks.owner, cu_seqlens, T, H, H // Hk, K, *q.stride()[:3], *k.stride()[:3],
        C=C, BK=min(padded(K), 64), RATES=RATES, PRECISION=way.precision, num_warps=4,
        maxnreg=128 if way.dot == torch.bfloat16 else None,  # four programs on a multiprocessor instead of three
    )  # fmt: skip
    starts, maps = rates.new_empty(0), rates.new_empty(0)
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    final = rates.new_empty(rows, H, K, V)
    if way.split:
        maps = rates.new_empty(way.segments.total, H, K, K + V)
        walk(q, k, v, inverse, None, rates, cu_seqlens, way, way.segments, final=maps)
        starts = join(maps, state, cu_seqlens, way, T, rows, V)
        walk(q, k, v, inverse, scores, rates, cu_seqlens, way, way.segments, start=starts, o=o, final=final)
    else:
        if way.segments.size <= T:
            starts = rates.new_empty(way.segments.total, H, K, V)
        kept = starts if starts.numel() else None
        walk(q, k, v, inverse, scores, rates, cu_seqlens, way, way.whole, start=state, o=o, final=final, kept=kept)
    return o, final, inverse, scores, rates, starts, maps


def walk(
    q,
    k,
    v,
    inverse,
    scores,
    rates,
    cu_seqlens,
    way: Plan,
    pieces: Pieces,
    *,
    start=None,
    o=None,
    final=None,
    states=None,
    update=None,
    kept=None,
):
    (_, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    BV = min(padded(V), way.tiles.columns)
    NV = triton.cdiv(V, BV)
    NK = triton.cdiv(K, BV) if o is None and states is None else 0
    launch(
        walk_kernel, (pieces.total * H * (NV + NK),),
        q, k, v, inverse, scores, rates, start, o, final, states, update, kept, pieces.owner, cu_seqlens,
        T, pieces.size, way.segments.size, H, H // Hk, K, V, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        C=way.tiles.chunk, BK=padded(K), BV=BV, NV=NV, NK=NK, RATES=RATES,
        PRECISION=way.precision, STAGES=way.tiles.stages, num_warps=way.tiles.warps,
    )  # fmt: skip


def join(maps, start, cu_seqlens, way: Plan, T: int, rows: int, V: int, starts: Tensor | None = None) -> Tensor:
    """Run the segments' maps one after the other; given ``starts`` (each segment's own part of the gradient), backward and in place."""
    segments, H, K = maps.shape[:3]
    reverse = starts is not None
    starts = maps.new_empty(segments, H, K, V) if starts is None else starts
    BV = min(padded(V), 16)
    NV = triton.cdiv(V, BV)
    launch(
        join_kernel,
        (rows * H * NV,),
        maps,
        start,
        starts,
        cu_seqlens,
        T,
        way.segments.size,
        H,
        K,
        V,
        BK=padded(K),
        BV=BV,
        PART=min(padded(K), 32),
        NV=NV,
        REVERSE=reverse,
        num_warps=4,
    )
    return starts
