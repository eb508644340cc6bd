"""A few tokens written by ``delta`` and read through CCQ in one launch, in place on both static states: the decode step of ``kla+ccq``.

    x = k̂ or k/√(‖k‖²+ε),   w' = a w + 1,   d = x − μ,   μ' = μ + d/w',   C' = a C + (a w/w') d dᵀ,   q' = q − (λ/w') C' q
    e = v̂ − a Sᵀk̂,   o = scale · (a Sᵀq̂' + (k̂ᵀq̂') β e),   S' = a S + k̂ (β e)ᵀ

One program owns one key head of one row: its C, μ and w, and the memories of all value heads that read with it. q' needs all of C, and
each column of those memories all of q', so programs that shared a head would read C while one of them overwrites it. None do. The program
walks through C, BC columns at a time, then through the memories, BV columns at a time, and reads and writes each once; the first tile of a
memory is on its way before. C'q is added up over C's columns, so q' forms where the walk through the memories wants it: in registers, a
column a token.

Nothing waits for the host and nothing is allocated but ``o``, so a CUDA graph may hold it. More than 16 tokens are as many launches.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.notation import CCQState, Coefficients
from fastweights.ops.delta.step_triton import one, write_and_read
from fastweights.ops.tiles_triton import padded, rows_side_by_side

TOKENS = 16
"""Most tokens of one launch."""
FULL = 264
"""Programs that fill the card: two a multiprocessor of an H200."""


class Shape(NamedTuple):
    """How a program walks."""

    numbers: int
    """Numbers of C or of a memory that it holds at a time; all their rows, so columns are that over padded K."""
    warps: int


SHAPES: dict[bool, Shape] = {True: Shape(4096, 4), False: Shape(16384, 16)}
"""First where rows and heads fill the card by themselves, second where they do not."""


@triton.jit
def step_kernel(
    q, k, v, beta, log_decay, ks, vs, qs, lam, memory, covariance, mean, weight, o, start, count, T, H, G, K, V,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, ks_heads, vs_heads, qs_heads, scale, eps,
    FORGET: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BC: tl.constexpr, NC: tl.constexpr, BV: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    """Tokens ``start … start + count`` of T."""
    h = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64)
    place = row * H + h
    i = tl.arange(0, BK)
    column = tl.arange(0, BT)
    first = row * T + start
    q += row * q_batch + start * q_token + h * q_head
    k += row * k_batch + start * k_token + h * k_head
    v += row * v_batch + start * v_token + h * G * v_head
    o += first * (H * G) * V
    covariance += place * K * K + i[:, None] * K
    memory += place * G * K * V + i[:, None] * V
    mean += place * K
    rows = (i < K)[:, None]
    vv = tl.arange(0, BV)
    S = tl.load(memory + vv[None, :], mask=rows & (vv < V)[None, :], other=0.0)
    mu_0 = tl.load(mean + i, mask=i < K, other=0.0)
    w_0 = tl.load(weight + place)
    mu = mu_0
    w = w_0
    taken = tl.zeros([BK, BT], tl.float32)  # what CCQ takes out of each query
    for block in range(NC):
        j = block * BC + tl.arange(0, BC)
        inside = rows & (j < K)[None, :]
        C = tl.load(covariance + j[None, :], mask=inside, other=0.0)
        mu = mu_0
        mu_j = tl.load(mean + j, mask=j < K, other=0.0)
        w = w_0
        for t in range(count):
            key = tl.load(k + t * k_token + i, mask=i < K, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(key * key, 0) + eps) if UNIT else one(ks, first + t, H, h, H, 1.0)
            a = tl.exp(one(log_decay, first + t, H, h, H, 0.0)) if FORGET else 1.0
            left = a * w
            w = left + 1.0
            d = key * factor - mu
            d_j = tl.load(k + t * k_token + j, mask=j < K, other=0.0).to(tl.float32) * factor - mu_j
            mu += d / w
            mu_j += d_j / w
            C = a * C + (left / w) * (d[:, None] * d_j[None, :])
            query = tl.load(q + t * q_token + j, mask=j < K, other=0.0).to(tl.float32)
            read = tl.sum(C * query[None, :], 1) * (tl.load(lam + (first + t) * H + h) / w)
            taken += tl.where(column[None, :] == t, read[:, None], 0.0)
        tl.store(covariance + j[None, :], C, mask=inside)
    there = q + column[None, :] * q_token + i[:, None]
    clean = tl.load(there, mask=rows & (column < count)[None, :], other=0.0).to(tl.float32) - taken
    for n in range(G * NV):
        head = h * G + n // NV
        vv = n % NV * BV + tl.arange(0, BV)
        inside = rows & (vv < V)[None, :]
        if n > 0:
            S = tl.load(memory + (n // NV) * K * V + vv[None, :], mask=inside, other=0.0)
        for t in range(count):
            token = first + t
            query = tl.sum(tl.where(column[None, :] == t, clean, 0.0), 1) * (one(qs, token, qs_heads, head, H * G, 1.0) * scale)
            key = tl.load(k + t * k_token + i, mask=i < K, other=0.0).to(tl.float32) * one(ks, token, ks_heads, head, H * G, 1.0)
            value = tl.load(v + t * v_token + (n // NV) * v_head + vv, mask=vv < V, other=0.0).to(tl.float32)
            value *= one(vs, token, vs_heads, head, H * G, 1.0)
            a = tl.exp(one(log_decay, token, H * G, head, H * G, 0.0))
            S, out = write_and_read(S, key, query, value, a, one(beta, token, H * G, head, H * G, 1.0))
            tl.store(o + (t * (H * G) + head) * V + vv, out.to(o.dtype.element_ty), mask=vv < V)
        tl.store(memory + (n // NV) * K * V + vv[None, :], S, mask=inside)
    tl.debug_barrier()  # other threads of this program still read μ and w
    tl.store(mean + i, mu, mask=i < K)
    tl.store(weight + place, w)


@torch.library.custom_op("fastweights::delta_ccq_step_", mutates_args=("memory", "covariance", "mean", "weight"))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    qs: Tensor | None,
    lam: Tensor,
    memory: Tensor,
    covariance: Tensor,
    mean: Tensor,
    weight: Tensor,
    scale: float,
    forget: bool,
    unit_keys: bool,
    eps: float,
    shape: list[int],
) -> Tensor:
    (B, T, Hk, K), (H, V) = k.shape, v.shape[2:]
    o = torch.empty(B, T, H, V, dtype=v.dtype, device=v.device)
    if q.numel() == 0:
        return o
    numbers, warps = shape
    BK = padded(K)
    BC, BV = (min(padded(size), max(16, numbers // BK)) for size in (K, V))
    warps = min(warps, BK * min(BC, BV) // 128)  # four numbers a thread, so that no two hold one (see the decay step)
    for start in range(0, T, TOKENS):
        count = min(TOKENS, T - start)
        step_kernel[(B * Hk,)](
            q, k, v, beta, log_decay, ks, vs, qs, lam, memory, covariance, mean, weight, o, start, count, T, Hk, H // Hk, K, V,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *(0 if x is None else x.shape[2] for x in (ks, vs, qs)), scale, eps,
            FORGET=forget, UNIT=unit_keys, BT=triton.next_power_of_2(count),
            BK=BK, BC=BC, NC=triton.cdiv(K, BC), BV=BV, NV=triton.cdiv(V, BV), num_warps=warps,
        )  # fmt: skip
    return o


@_step.register_fake
def _shapes(q, k, v, beta, log_decay, ks, vs, qs, lam, memory, covariance, mean, weight, scale, forget, unit_keys, eps, shape):
    return v.new_empty(v.shape)


def why_not(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients) -> str | None:
    """Why the kernel cannot take these operands, or None if it can."""
    if k.shape[3] > 256:
        return f"the delta step with CCQ takes K up to 256, and K is {k.shape[3]}"
    return None


def delta_ccq_step_triton_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    lam: Tensor,
    memory: Tensor,
    moments: CCQState,
    *,
    forget: bool = False,
    unit_keys: bool = False,
    eps: float = 1e-6,
    scale: float = 1.0,
    shape: Shape | None = None,
) -> Tensor:
    """As `delta_ccq_step_`, which says what the operands are; ``shape`` replaces the table's.

    Raises:
        ValueError: if a state is not a dense float32 tensor, since a copy of it could not be updated in place.
    """
    for name, x in (("memory", memory), *moments._asdict().items()):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"an in-place step needs a dense float32 {name}; got {x.dtype} with strides {tuple(x.stride())}")
    coefficients = [None if x is None else x.float().contiguous() for x in (*coef, lam)]
    shape = SHAPES[k.shape[0] * k.shape[2] >= FULL] if shape is None else shape
    return _step(*map(rows_side_by_side, (q, k, v)), *coefficients, memory, *moments, scale, forget, unit_keys, eps, [*shape])
