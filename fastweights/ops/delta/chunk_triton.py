"""`chunk_delta_triton`: the ``delta`` family on the GPU, as two custom ops that autograd and torch.compile know."""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.delta import chunk_backward_triton, chunk_forward_triton
from fastweights.ops.delta.chunk_forward_triton import RATES, Tiles, operand_in_full, segment_size
from fastweights.ops.launch_triton import compiled_together
from fastweights.ops.tiles_triton import operand, padded, piece_count, rows_side_by_side

TILES: dict[tuple[str, str, int], Tiles] = {
    # (card, how operands are multiplied, largest padded K): read from the top, the first that fits
    ("large", "bf16", 64): Tiles(64, 64, 4, 3, 3, 64, 64, 8, 2),
    ("large", "bf16", 128): Tiles(64, 64, 4, 2, 3, 128, 64, 8, 3),
    ("large", "bf16", 256): Tiles(32, 64, 8, 1, 1, 128, 32, 8, 2),
    ("large", "tf32", 128): Tiles(32, 32, 4, 2, 2, 64, 32, 8, 2),
    ("large", "tf32", 256): Tiles(32, 16, 4, 1, 1, 64, 32, 8, 1),
    ("large", "ieee", 64): Tiles(16, 32, 4, 2, 2, 64, 16, 8, 1),
    ("large", "ieee", 256): Tiles(16, 16, 4, 1, 1, 64, 16, 8, 1),
    ("small", "bf16", 256): Tiles(32, 32, 4, 1, 1, 64, 32, 4, 1),
    ("small", "tf32", 256): Tiles(16, 16, 4, 1, 1, 32, 16, 4, 1),
    ("small", "ieee", 256): Tiles(16, 16, 4, 1, 1, 32, 16, 4, 1),
}
"""Tile shapes instead of autotuning. A "large" card has the 227 KB of shared memory of a Hopper data-centre GPU, a "small" one 99 KB.

float32 stays with chunks of 16: where keys repeat under β near 2, the inverse of a larger triangle loses a digit that bfloat16 never had.
"""


def card_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "large"
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return "large" if most >= 220_000 else "small"


def tiles_for(q: Tensor, k: Tensor, v: Tensor, card: str | None = None) -> Tiles:
    """The table's entry for these operands."""
    dot, precision = operand_in_full(q.dtype, k.dtype, v.dtype)
    key = (card or card_of(q.device), "bf16" if dot == torch.bfloat16 else precision)
    return next(tiles for (*kind, size), tiles in TILES.items() if tuple(kind) == key and padded(k.shape[3]) <= size)


def why_not(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients) -> str | None:
    """Why the kernels cannot take these operands, or None if they can."""
    if k.shape[3] > 256:
        return f"the delta kernels take K up to 256, and K is {k.shape[3]}"
    return None


def chunk_delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_delta`, with kernels: o ``[B, T, Hv, V]`` in v's dtype, S ``[R, Hv, K, V]`` float32. ``tiles`` overrides the table."""
    beta, log_decay, ks, vs, qs = (None if x is None else x.float() for x in coef)
    state = None if state is None else state.float()
    tiles = tiles_for(q, k, v) if tiles is None else tiles
    o, final, *_ = delta_forward(q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, list(tiles))
    return o, final


_backward_kernels = compiled_together(chunk_backward_triton.backward)


def _backward_ahead(operands: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
    """As a loss calls it that leaves the final state alone."""
    o, _, *kept = results
    _backward_kernels(*operands, o, None, *kept)


_forward = compiled_together(chunk_forward_triton.forward, _backward_ahead)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


@torch.library.custom_op("fastweights::delta_forward", mutates_args=())
def delta_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    qs: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    tiles: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``o``, the final state; for the backward L⁻¹, P and rates of every chunk, and each segment's start and map (empty in one segment)."""
    if v.shape[1] == 0:
        o, final, *rest = delta_forward_shapes(q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, tiles)
        return o, final.zero_() if state is None else final.copy_(state), *rest
    q, k, v = map(rows_side_by_side, (q, k, v))
    beta, log_decay, ks, vs, qs, state, cu_seqlens = _dense(beta, log_decay, ks, vs, qs, state, cu_seqlens)
    return _forward(q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, Tiles(*tiles))


@delta_forward.register_fake
def delta_forward_shapes(q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, tiles):
    (B, T, _, K), (H, V), tiles = k.shape, v.shape[2:], Tiles(*tiles)
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, final = v.new_empty(B, T, H, V), v.new_empty(rows, H, K, V, dtype=torch.float32)
    if T == 0:
        return o, final, *(final.new_empty(0) for _ in range(5))
    chunks = piece_count(B, T, tiles.chunk, cu_seqlens)
    inverse = v.new_empty(chunks, H, tiles.chunk, tiles.chunk, dtype=operand(q.dtype, k.dtype, v.dtype)[0])
    rates = final.new_empty(chunks, H, RATES, tiles.chunk)
    size, split = segment_size(rows, T, H, V, tiles)
    segments = piece_count(B, T, size, cu_seqlens)
    starts = final.new_empty(segments, H, K, V) if size <= T else final.new_empty(0)
    maps = final.new_empty(segments, H, K, K + V) if split else final.new_empty(0)
    return o, final, inverse, torch.empty_like(inverse), rates, starts, maps


@torch.library.custom_op("fastweights::delta_backward", mutates_args=())
def delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    qs: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    tiles: Sequence[int],
    do: Tensor,
    dfinal: Tensor | None,
    inverse: Tensor,
    scores: Tensor,
    rates: Tensor,
    starts: Tensor,
    maps: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of q, k, v, β, log_decay, the scales of keys, values and queries, state; empty where there is none."""
    if v.shape[1] == 0:
        *found, dstate = delta_backward_shapes(
            q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, tiles, do, dfinal, inverse, scores, rates, starts, maps
        )
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        dstate = dstate.new_zeros(rows, *dstate.shape[1:])
        return *found, dstate if dfinal is None else dstate.copy_(dfinal)
    q, k, v = map(rows_side_by_side, (q, k, v))
    beta, log_decay, ks, vs, qs, state, cu_seqlens, dfinal = _dense(beta, log_decay, ks, vs, qs, state, cu_seqlens, dfinal)
    found = _backward_kernels(
        q,
        k,
        v,
        beta,
        log_decay,
        ks,
        vs,
        qs,
        state,
        cu_seqlens,
        scale,
        Tiles(*tiles),
        do.contiguous(),
        dfinal,
        inverse,
        scores,
        rates,
        starts,
        maps,
    )
    return tuple(rates.new_empty(0) if x is None else x for x in found)  # type: ignore[return-value]  # nine of them


@delta_backward.register_fake
def delta_backward_shapes(
    q, k, v, beta, log_decay, ks, vs, qs, state, cu_seqlens, scale, tiles, do, dfinal, inverse, scores, rates, starts, maps
):  # fmt: skip
    def like(x: Tensor | None) -> Tensor:
        return rates.new_empty(0) if x is None else x.new_empty(x.shape)

    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dstate = rates.new_empty(rows, v.shape[2], k.shape[3], v.shape[3])
    return *map(like, (q, k, v, beta, log_decay, ks, vs, qs)), dstate


def _setup(ctx, inputs, output):
    *operands, ctx.scale, ctx.tiles = inputs
    _, _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *kept)


def _backward(ctx, do, dfinal, *_):
    operands, kept = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
    if do is None:
        do = torch.zeros_like(operands[2])
    found = delta_backward(*operands, ctx.scale, ctx.tiles, do, dfinal, *kept)
    return *(None if x is None else dx for x, dx in zip(operands[:9], found, strict=True)), None, None, None


delta_forward.register_autograd(_backward, setup_context=_setup)
