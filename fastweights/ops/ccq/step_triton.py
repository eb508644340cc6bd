"""A few tokens of the curvature-conditioned query in one launch, in place on a static state: statistics and read together.

One program owns all of one row's and head's C, since q' needs all of C q only by columns but μ and w must be written once; it walks through
the columns, BV at a time, and reads and writes each once whatever the number of tokens. For several tokens μ is walked again for each tile.

    w' = a w + 1,   d = k − μ,   μ' = μ + d / w',   C' = a C + (a w / w') d dᵀ,   q' = q − (λ / w') C'ᵀ q
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.notation import CCQState
from fastweights.ops.tiles_triton import padded


@triton.jit
def load_key(k, ks, token, H, h, K, i):
    key = tl.load(k + (token * H + h) * K + i, mask=i < K, other=0.0).to(tl.float32)
    if ks is not None:
        key *= tl.load(ks + token * H + h)
    return key


@triton.jit
def step_kernel(
    q, k, lam, g, ks, covariance, mean, weight, out, T, H, K, BK: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr
):  # fmt: skip
    h = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64)
    place = row * H + h
    i = tl.arange(0, BK)
    mu_0 = tl.load(mean + place * K + i, mask=i < K, other=0.0)
    w_0 = tl.load(weight + place)
    mu = mu_0
    w = w_0
    for block in range(NV):
        j = block * BV + tl.arange(0, BV)
        there = covariance + place * K * K + i[:, None] * K + j[None, :]
        inside = (i < K)[:, None] & (j < K)[None, :]
        C = tl.load(there, mask=inside, other=0.0)
        mu_j = tl.load(mean + place * K + j, mask=j < K, other=0.0)
        mu = mu_0
        w = w_0
        for t in range(T):
            token = row * T + t
            a = 1.0 if g is None else tl.exp(tl.load(g + token * H + h))
            left = a * w
            w = left + 1.0
            d = load_key(k, ks, token, H, h, K, i) - mu
            d_j = load_key(k, ks, token, H, h, K, j) - mu_j
            mu += d / w
            mu_j += d_j / w
            C = a * C + (left / w) * d[:, None] * d_j[None, :]
            query = tl.load(q + (token * H + h) * K + i, mask=i < K, other=0.0).to(tl.float32)
            read = tl.sum(C * query[:, None], 0) * (tl.load(lam + token * H + h) / w)
            query = tl.load(q + (token * H + h) * K + j, mask=j < K, other=0.0).to(tl.float32)
            tl.store(out + (token * H + h) * K + j, (query - read).to(out.dtype.element_ty), mask=j < K)
        tl.store(there, C, mask=inside)
    tl.debug_barrier()  # other threads of this program still read μ
    tl.store(mean + place * K + i, mu, mask=i < K)
    tl.store(weight + place, w)


@torch.library.custom_op("fastweights::ccq_step_", mutates_args=("covariance", "mean", "weight"))
def _step(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    g: Tensor | None,
    ks: Tensor | None,
    covariance: Tensor,
    mean: Tensor,
    weight: Tensor,
) -> Tensor:
    B, T, H, K = k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel():
        BK = padded(K)
        BV = min(BK, 64)
        warps = min(8, BK * BV // 128)  # four numbers a thread: were two to hold one, one could read it after the other has written
        step_kernel[(B * H,)](
            q, k, lam, g, ks, covariance, mean, weight, out, T, H, K, BK=BK, BV=BV, NV=triton.cdiv(K, BV), num_warps=warps
        )  # fmt: skip
    return out


@_step.register_fake
def _shapes(q, k, lam, g, ks, covariance, mean, weight):
    return q.new_empty(q.shape)


def why_not(q: Tensor, k: Tensor) -> str | None:
    """Why the kernel cannot take these operands, or None if it can."""
    if q.shape[-1] > 256:
        return f"the CCQ step takes K up to 256, and K is {q.shape[-1]}"
    return None


def ccq_step_triton_(
    q: Tensor, k: Tensor, lam: Tensor, state: CCQState, *, log_decay: Tensor | None = None, key_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As `ccq_query_triton` over the T tokens given, overwriting the tensors of ``state`` (float32, dense); returns q' ``[B, T, Hk, K]``.

    Raises:
        ValueError: if the state is not dense float32, since a copy of it could not be updated in place.
    """
    if not all(x.dtype == torch.float32 and x.is_contiguous() for x in state):
        raise ValueError(f"an in-place step needs a dense float32 state; got {[(x.dtype, tuple(x.stride())) for x in state]}")
    log_decay, key_scale = (None if x is None else x.float().contiguous() for x in (log_decay, key_scale))
    return _step(q.contiguous(), k.contiguous(), lam.float().contiguous(), log_decay, key_scale, *state)
