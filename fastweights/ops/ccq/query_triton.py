"""`ccq_query_triton`: the fused curvature-conditioned query on the GPU, as two custom ops that autograd and torch.compile know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.notation import CCQState
from fastweights.ops.ccq import backward_triton, forward_triton
from fastweights.ops.ccq.forward_triton import Keys, Moments, Shape, Tiles, one_shape, segment_length
from fastweights.ops.decay.segments_triton import Segments, cut_segments, tokens_first
from fastweights.ops.tiles_triton import operand, padded

TILES: dict[tuple[int, int], Tiles] = {
    **{(2, size): Tiles(Shape(64, 4, 1), Shape(64, 4, 2), Shape(64, 4, 2), Shape(32, 4, 3)) for size in (16, 32, 64, 128)},
    **{(4, size): one_shape(Shape(32, 4, 1)) for size in (16, 32, 64, 128)},
}
"""By the bytes of an operand (float16 is read as four, see `operand`) and padded K. Replace an entry to try another shape."""
SMALL = one_shape(Shape(16, 4, 1))
"""Fits 99 KB of shared memory for every K and operand, as consumer cards need."""


def why_not(q: Tensor, k: Tensor) -> str | None:
    """Why the kernels cannot take these operands, or None if they can."""
    if q.shape[-1] > 128:
        return f"the CCQ kernels take K up to 128, and K is {q.shape[-1]}"
    return None


def ccq_query_triton(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    *,
    key_scale: Tensor | None = None,
    state: CCQState | None = None,
    cu_seqlens: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, CCQState]:
    """q' = q − (λ/w)·C q over the keys ``key_scale·k``: ``[B, T, Hk, K]`` in q's dtype, and the new state.

    lam and key_scale are ``[B, T, Hk]``; with ``cu_seqlens`` B = 1. C of a given state is taken to be symmetric, and so is its gradient.
    """
    lam, key_scale = lam.float().contiguous(), None if key_scale is None else key_scale.float().contiguous()
    moments = (None, None, None) if state is None else tuple(x.float().contiguous() for x in state)
    if tiles is None:
        tiles = TILES[operand(q.dtype, k.dtype)[0].itemsize, padded(k.shape[3])]
    out, *rest = ccq_forward(q, k.to(q.dtype), lam, key_scale, *moments, cu_seqlens, _flat(tiles))
    return out, CCQState(*rest[:3])


def _flat(tiles: Tiles) -> list[int]:
    return [size for shape in tiles[:4] for size in shape] + [tiles.segment]


def _tiles(flat: Sequence[int]) -> Tiles:
    read, key, moment, pair = (Shape(*flat[i : i + 3]) for i in range(0, 12, 3))
    return Tiles(read, key, moment, pair, flat[12])


@torch.library.custom_op("fastweights::ccq_forward", mutates_args=())
def ccq_forward(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    ks: Tensor | None,
    covariance: Tensor | None,
    mean: Tensor | None,
    weight: Tensor | None,
    cu_seqlens: Tensor | None,
    tiles: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q', the final C, μ, w; for the backward: R, μ, w before each segment, ρ, and the `Keys`."""
    state = None if covariance is None else (covariance, mean, weight)
    if k.shape[1] == 0:
        shapes = ccq_forward_shapes(q, k, lam, ks, covariance, mean, weight, cu_seqlens, tiles)
        for i in range(3):
            shapes[1 + i].zero_() if state is None else shapes[1 + i].copy_(state[i])
        return shapes
    cut = _cut(k, cu_seqlens, _tiles(tiles))
    q, k = tokens_first(q), tokens_first(k)
    return forward_triton.forward(q, k, lam, ks, state, cut, _tiles(tiles))


@ccq_forward.register_fake
def ccq_forward_shapes(q, k, lam, ks, covariance, mean, weight, cu_seqlens, tiles):
    B, T, H, K = k.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    length, kind = segment_length(B * T, H, _tiles(tiles)), operand(k.dtype)[0]
    count = 0 if T == 0 else B * (-(-T // length)) if cu_seqlens is None else T // length + rows

    def moments(n, dtype):
        return lam.new_empty(n, H, K, K, dtype=dtype), lam.new_empty(n, H, K), lam.new_empty(n, H)

    sums = lam.new_empty(count, length // _tiles(tiles).moment.chunk, H, K)
    keys = k.new_empty(B, T, H, K, dtype=kind), sums, lam.new_empty(count, H, K)
    return q.new_empty(B, T, H, K), *moments(rows, lam.dtype), *moments(count, kind), lam.new_empty(H, B * T), *keys


def _cut(k: Tensor, cu_seqlens: Tensor | None, tiles: Tiles) -> Segments:
    B, T, H, _ = k.shape
    return cut_segments(B, T, segment_length(B * T, H, tiles), cu_seqlens)


@torch.library.custom_op("fastweights::ccq_backward", mutates_args=())
def ccq_backward(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    ks: Tensor | None,
    cu_seqlens: Tensor | None,
    tiles: Sequence[int],
    grad: Tensor,
    dcovariance: Tensor | None,
    dmean: Tensor | None,
    dweight: Tensor | None,
    final: Sequence[Tensor],
    before: Sequence[Tensor],
    rho: Tensor,
    keys: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, lam, ks (empty if not given), and P, r, κ of each row (see backward_triton)."""
    shapes = ccq_backward_shapes(q, k, lam, ks, cu_seqlens, tiles, grad, dcovariance, dmean, dweight, final, before, rho, keys)
    if k.shape[1] == 0:
        shapes[4].zero_() if dcovariance is None else shapes[4].copy_(dcovariance + dcovariance.mT)
        shapes[5].zero_() if dmean is None else shapes[5].copy_(-dmean / final[2].clamp(min=1e-30).unsqueeze(-1))
        shapes[6].zero_() if dweight is None else shapes[6].copy_(dweight)
        return shapes
    cut = _cut(k, cu_seqlens, _tiles(tiles))
    q, k = tokens_first(q), tokens_first(k)
    dstate = tuple(None if x is None else x.contiguous() for x in (dcovariance, dmean, dweight))
    dq, dk, dlam, dks, row = backward_triton.backward(
        q, k, lam, ks, grad.contiguous(), rho, dstate, Keys(*keys), Moments(*before), Moments(*final), k.shape[1], cut, _tiles(tiles)
    )
    return dq, dk, dlam, shapes[3] if dks is None else dks, *row


@ccq_backward.register_fake
def ccq_backward_shapes(q, k, lam, ks, cu_seqlens, tiles, grad, dcovariance, dmean, dweight, final, before, rho, keys):
    dks = lam.new_empty(0) if ks is None else ks.new_empty(ks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), lam.new_empty(lam.shape), dks, *(x.new_empty(x.shape) for x in final)


def _setup(ctx, inputs, output):
    q, k, lam, ks, _, mean, weight, cu_seqlens, ctx.tiles = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, lam, ks, cu_seqlens, mean, weight, *output[1:])


def _backward(ctx, grad, dcovariance, dmean, dweight, *_):
    q, k, lam, ks, cu_seqlens, mean, weight, *rest = ctx.saved_tensors
    final, before, rho, keys = rest[:3], rest[3:6], rest[6], rest[7:]
    if grad is None:
        grad = torch.zeros_like(q)
    dq, dk, dlam, dks, P, r, kappa = ccq_backward(
        q, k, lam, ks, cu_seqlens, ctx.tiles, grad, dcovariance, dmean, dweight, final, before, rho, keys
    )
    dstate = (None, None, None)
    if mean is not None:  # the state is a key of weight w at μ, with a spread C of its own
        x = mean - final[1]
        pull = (P @ x.unsqueeze(-1)).squeeze(-1)
        dmu = weight.unsqueeze(-1) * (pull - r)
        if dmean is not None:  # a row that stays empty hands its mean on
            dmu = torch.where(final[2].unsqueeze(-1) > 0, dmu, dmean)
        dstate = (P / 2, dmu, (x * (0.5 * pull - r)).sum(-1) + kappa)
    return dq, dk, dlam, None if ks is None else dks, *dstate, None, None


ccq_forward.register_autograd(_backward, setup_context=_setup)
