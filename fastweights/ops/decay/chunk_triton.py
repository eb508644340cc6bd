"""`chunk_decay_triton`: the ``decay`` family on the GPU, as two custom ops that autograd and torch.compile know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.decay import chunk_backward_triton, chunk_forward_triton
from fastweights.ops.decay.segments_triton import Tile, cut_segments, segment_length, tokens_first
from fastweights.ops.tiles_triton import operand, padded

TILES: dict[tuple[int, int], Tile] = {
    **{(2, size): Tile(64, 64, 4, 2) for size in (16, 32, 64, 128)},
    (2, 256): Tile(64, 64, 4, 1),
    **{(4, size): Tile(32, 64, 4, 1) for size in (16, 32, 64, 128)},
    (4, 256): Tile(16, 64, 4, 1),
}
"""By the bytes of an operand (float16 is read as four: `operand`) and padded K, for a decay per head. Replace an entry to try another."""
CHANNEL_TILES: dict[tuple[int, int], Tile] = {
    **{(2, size): Tile(32, 64, 4, 1) for size in (16, 32, 64, 128)},
    (2, 256): Tile(16, 64, 4, 1),
    **{(4, size): Tile(16, 64, 4, 1) for size in (16, 32, 64, 128, 256)},
}
"""The same for a decay per channel."""
SMALL_TILE = Tile(16, 64, 4, 1)
"""Fits 99 KB of shared memory, as consumer cards need, for every K and operand but float32 with K = 256."""


def why_not(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients) -> str | None:
    """Why the kernels cannot take these operands, or None if they can."""
    if k.shape[3] > 256:
        return f"the decay kernels take K up to 256, and K is {k.shape[3]}"
    return None


def chunk_decay_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_decay`, with kernels: ``o [B, T, Hv, V]`` in v's dtype and ``S [R, Hv, K, V]`` float32. ``tile`` replaces the table.

    Raises:
        ValueError: a tile that is known to give wrong numbers.
    """
    g, ks, vs, qs = (
        None if x is None else x.float().contiguous() for x in (coef.log_decay, coef.key_scale, coef.value_scale, coef.query_scale)
    )
    per_channel = g is not None and g.dim() == 4
    entry = operand(q.dtype, k.dtype, v.dtype)[0].itemsize, padded(k.shape[3])
    tile = tile or (CHANNEL_TILES if per_channel else TILES)[entry]
    if per_channel and entry == (4, 256) and tuple(tile[:4]) == (32, 64, 4, 1):
        raise ValueError(
            f"{tile} at K=256 in float32 with a decay per channel: Triton 3.6 compiles it to wrong gradients; take chunks of 16"
        )
    state = None if state is None else state.float()
    o, final, _, _ = decay_forward(q, k, v, g, qs, ks, vs, state, cu_seqlens, scale, list(tile))
    return o, final


@torch.library.custom_op("fastweights::decay_forward", mutates_args=())
def decay_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    qs: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    tile: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``o``, the final state; for the backward: the memory before each segment, and each segment's total log decay."""
    if v.shape[1] == 0:
        final = decay_forward_shapes(q, k, v, g, qs, ks, vs, state, cu_seqlens, scale, tile)[1]
        final = final.zero_() if state is None else final.copy_(state)
        return torch.empty_like(v), final, final.new_empty(0), final.new_empty(0)
    shape = Tile(*tile)
    cut = _cut(v, cu_seqlens, shape)
    q, k, v = tokens_first(q), tokens_first(k), tokens_first(v)
    state = None if state is None else state.contiguous()
    return chunk_forward_triton.forward(q, k, v, g, qs, ks, vs, state, cut, shape, scale)


@decay_forward.register_fake
def decay_forward_shapes(q, k, v, g, qs, ks, vs, state, cu_seqlens, scale, tile):
    (B, T, _, K), (Hv, V) = k.shape, v.shape[2:]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, final = v.new_empty(B, T, Hv, V), v.new_empty(rows, Hv, K, V, dtype=torch.float32)
    if T == 0:
        return o, final, final.new_empty(0), final.new_empty(0)
    length = segment_length(B * T, Hv, Tile(*tile))
    count = B * (-(-T // length)) if cu_seqlens is None else T // length + rows
    total = (count, Hv, K) if g is not None and g.dim() == 4 else (count, Hv)
    return o, final, final.new_empty(count, Hv, K, V), final.new_empty(total)


def _cut(v: Tensor, cu_seqlens: Tensor | None, tile: Tile):
    B, T, Hv, _ = v.shape
    return cut_segments(B, T, segment_length(B * T, Hv, tile), cu_seqlens)


@torch.library.custom_op("fastweights::decay_backward", mutates_args=())
def decay_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    qs: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    tile: Sequence[int],
    do: Tensor,
    dfinal: Tensor | None,
    memory: Tensor,
    total: Tensor,
    final: Tensor,
    need_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of q, k, v, g, qs, ks, vs, state; empty where there is none."""
    if v.shape[1] == 0:
        shapes = decay_backward_shapes(q, k, v, g, qs, ks, vs, cu_seqlens, scale, tile, do, dfinal, memory, total, final, need_dg)
        shapes[7].zero_() if dfinal is None else shapes[7].copy_(dfinal)
        return shapes
    shape = Tile(*tile)
    cut = _cut(v, cu_seqlens, shape)
    q, k, v = tokens_first(q), tokens_first(k), tokens_first(v)
    dfinal = None if dfinal is None else dfinal.contiguous()
    found = chunk_backward_triton.backward(
        q, k, v, g, qs, ks, vs, do.contiguous(), dfinal, memory, total, final, cut, shape, scale, need_dg=need_dg
    )
    dq, dk, dv, dg, dqs, dks, dvs, dstate = (final.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dg, dqs, dks, dvs, dstate


@decay_backward.register_fake
def decay_backward_shapes(q, k, v, g, qs, ks, vs, cu_seqlens, scale, tile, do, dfinal, memory, total, final, need_dg):
    def like(x: Tensor | None) -> Tensor:
        return final.new_empty(0) if x is None else x.new_empty(x.shape)

    return like(q), like(k), like(v), like(g if need_dg else None), like(qs), like(ks), like(vs), final.new_empty(final.shape)


def _setup(ctx, inputs, output):
    q, k, v, g, qs, ks, vs, state, cu_seqlens, ctx.scale, ctx.tile = inputs
    _, final, memory, total = output
    ctx.has_state = state is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, qs, ks, vs, cu_seqlens, memory, total, final)


def _backward(ctx, do, dfinal, *_):
    q, k, v, g, qs, ks, vs, cu_seqlens, memory, total, final = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    need_dg = g is not None and ctx.needs_input_grad[3]
    found = decay_backward(q, k, v, g, qs, ks, vs, cu_seqlens, ctx.scale, ctx.tile, do, dfinal, memory, total, final, need_dg)
    dq, dk, dv, dg, dqs, dks, dvs, dstate = found
    return (
        dq, dk, dv, dg if need_dg else None, dqs if qs is not None else None, dks if ks is not None else None,
        dvs if vs is not None else None, dstate if ctx.has_state else None, None, None, None,
    )  # fmt: skip


decay_forward.register_autograd(_backward, setup_context=_setup)
