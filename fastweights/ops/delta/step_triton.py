"""A few tokens of the ``delta`` family in one launch, in place on a static memory: the decode step.

Each program owns BV columns of one row's and head's memory and reads and writes them once, whatever the number of tokens. Both products
with the memory before the write are taken in one pass, so the read after the write needs no second one:

    e = v̂ − a Sᵀk̂,   o = scale · (a Sᵀq̂ + (k̂ᵀq̂) β e),   S ← a S + k̂ (β e)ᵀ

Nothing waits for the host and nothing is allocated but ``o``, so a CUDA graph may hold it.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.tiles_triton import padded, rows_side_by_side

COLUMNS: dict[bool, tuple[int, int]] = {True: (32, 2), False: (16, 1)}
"""Columns and warps of a program; first where rows and heads fill the card by themselves, second where they do not."""
FULL = 1024
"""Programs of 32 columns that fill the card."""


@triton.jit
def one(base, token, heads, h, H, other):
    if base is None:
        return tl.full([], other, tl.float32)
    else:
        return tl.load(base + token * heads + h * heads // H)


@triton.jit
def write_and_read(S, key, query, value, a, b):
    """One token: the columns of the memory after the write, and what is read from them."""
    stored = tl.sum(S * key[:, None], 0)
    read = tl.sum(S * query[:, None], 0)
    write = b * (value - a * stored)
    return a * S + key[:, None] * write[None, :], a * read + tl.sum(key * query, 0) * write


@triton.jit
def step_kernel(
    q, k, v, beta, log_decay, ks, vs, qs, state, o, T, H, G, K, V,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, ks_heads, vs_heads, qs_heads, scale,
    BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % NV
    h = tl.program_id(0) // NV % H
    row = (tl.program_id(0) // NV // H).to(tl.int64)
    kk = tl.arange(0, BK)
    vv = tile * BV + tl.arange(0, BV)
    there = state + (row * H + h) * K * V + kk[:, None] * V + vv[None, :]
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    S = tl.load(there, mask=inside, other=0.0)
    q += row * q_batch + h // G * q_head + kk
    k += row * k_batch + h // G * k_head + kk
    v += row * v_batch + h * v_head + vv
    for t in range(T):
        token = row * T + t
        key = tl.load(k + t * k_token, mask=kk < K, other=0.0).to(tl.float32) * one(ks, token, ks_heads, h, H, 1.0)
        query = tl.load(q + t * q_token, mask=kk < K, other=0.0).to(tl.float32) * (one(qs, token, qs_heads, h, H, 1.0) * scale)
        value = tl.load(v + t * v_token, mask=vv < V, other=0.0).to(tl.float32) * one(vs, token, vs_heads, h, H, 1.0)
        a = tl.exp(one(log_decay, token, H, h, H, 0.0))
        b = one(beta, token, H, h, H, 1.0)
        S, out = write_and_read(S, key, query, value, a, b)
        tl.store(o + (token * H + h) * V + vv, out.to(o.dtype.element_ty), mask=vv < V)
    tl.store(there, S, mask=inside)


@torch.library.custom_op("fastweights::delta_step_", mutates_args=("state",))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    qs: Tensor | None,
    state: Tensor,
    scale: float,
) -> Tensor:
    (B, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    BV, warps = COLUMNS[B * H * triton.cdiv(V, 32) >= FULL]
    BV = min(BV, triton.next_power_of_2(V))
    NV = triton.cdiv(V, BV)
    if o.numel() == 0:
        return o
    step_kernel[(B * H * NV,)](
        q, k, v, beta, log_decay, ks, vs, qs, state, o, T, H, H // Hk, K, V, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *(0 if x is None else x.shape[2] for x in (ks, vs, qs)), scale, BK=padded(K), BV=BV, NV=NV, num_warps=warps,
    )  # fmt: skip
    return o


@_step.register_fake
def _shapes(q, k, v, beta, log_decay, ks, vs, qs, state, scale):
    return v.new_empty(v.shape)


def why_not(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients) -> str | None:
    """Why the kernel cannot take these operands, or None if it can."""
    if k.shape[3] > 256:
        return f"the delta step takes K up to 256, and K is {k.shape[3]}"
    return None


def delta_step_triton_(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """As `recurrent_delta` over the T tokens given, overwriting ``state [B, Hv, K, V]`` (float32, dense); returns ``o [B, T, Hv, V]``.

    Raises:
        ValueError: if the memory is not a dense float32 tensor, since a copy of it could not be updated in place.
    """
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"an in-place step needs a dense float32 state; got {state.dtype} with strides {tuple(state.stride())}")
    coefficients = [None if x is None else x.float().contiguous() for x in coef]
    return _step(*map(rows_side_by_side, (q, k, v)), *coefficients, state, scale)
