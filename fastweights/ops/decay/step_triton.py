"""A few tokens of the ``decay`` family in one launch, in place on a static memory: the decode step.

Each program owns BV columns of one row's and head's memory and reads and writes them once, whatever the number of tokens:

    S ← diag(a) S + k̂ v̂ᵀ,   o = scale · Sᵀ q̂

Nothing waits for the host and nothing is allocated but ``o``, so a CUDA graph may hold it.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.decay.chunk_forward_triton import heads_in
from fastweights.ops.decay.chunk_triton import why_not as why_not
from fastweights.ops.tiles_triton import padded

FULL, FEW = (32, 4), (8, 2)
"""Columns and warps of a program where rows and heads fill the card by themselves, and where they do not."""


@triton.jit
def one(base, token, heads, h, H, other):
    if base is None:
        return tl.full([], other, tl.float32)
    else:
        return tl.load(base + token * heads + h * heads // H)


@triton.jit
def step_kernel(
    q, k, v, g, qs, ks, vs, state, o, T, H, G, K, V, qs_heads, ks_heads, vs_heads, scale,
    BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr, CHANNEL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % NV * BV
    h = tl.program_id(0) // NV % H
    row = (tl.program_id(0) // NV // H).to(tl.int64)
    i = tl.arange(0, BK)
    j = column + tl.arange(0, BV)
    place = (row * H + h) * K * V + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    S = tl.load(state + place, mask=inside, other=0.0)
    for t in range(T):
        token = row * T + t
        key_head = (token * (H // G) + h // G) * K + i
        key = tl.load(k + key_head, mask=i < K, other=0.0).to(tl.float32) * one(ks, token, ks_heads, h, H, 1.0)
        query = tl.load(q + key_head, mask=i < K, other=0.0).to(tl.float32) * one(qs, token, qs_heads, h, H, 1.0)
        value = tl.load(v + (token * H + h) * V + j, mask=j < V, other=0.0).to(tl.float32) * one(vs, token, vs_heads, h, H, 1.0)
        if CHANNEL:
            S *= tl.exp(tl.load(g + key_head, mask=i < K, other=0.0))[:, None]
        else:
            S *= tl.exp(one(g, token, H, h, H, 0.0))
        S += key[:, None] * value[None, :]
        out = tl.sum(S * query[:, None], 0) * scale
        tl.store(o + (token * H + h) * V + j, out.to(o.dtype.element_ty), mask=j < V)
    tl.store(state + place, S, mask=inside)


@torch.library.custom_op("fastweights::decay_step_", mutates_args=("state",))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    qs: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    state: Tensor,
    scale: float,
) -> Tensor:
    (B, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    if o.numel() == 0:
        return o
    BV, warps = FULL if B * H * triton.cdiv(V, 32) >= 256 else FEW
    NV = triton.cdiv(V, BV)
    warps = min(warps, padded(K) * BV // 128)  # four numbers a thread: were two to hold one, one could read it after the other has written
    step_kernel[(B * H * NV,)](
        q, k, v, g, qs, ks, vs, state, o, T, H, H // Hk, K, V, heads_in(qs), heads_in(ks), heads_in(vs), scale,
        BK=padded(K), BV=BV, NV=NV, CHANNEL=g is not None and g.dim() == 4, num_warps=warps,
    )  # fmt: skip
    return o


@_step.register_fake
def _shapes(q, k, v, g, qs, ks, vs, state, scale):
    return v.new_empty(v.shape)


def decay_step_triton_(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """As `recurrent_decay` over the T tokens given, overwriting ``state [B, Hv, K, V]`` (float32, dense); returns ``o [B, T, Hv, V]``.

    Raises:
        ValueError: if the memory is not a dense float32 tensor, since a copy of it could not be updated in place.
    """
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"an in-place step needs a dense float32 state; got {state.dtype} with strides {tuple(state.stride())}")
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, qs, ks, vs = (
        None if x is None else x.float().contiguous() for x in (coef.log_decay, coef.query_scale, coef.key_scale, coef.value_scale)
    )
    return _step(q, k, v, g, qs, ks, vs, state, scale)
