"""The ``decay`` recurrence token by token: the form for one token or a few, as in decoding, and a check on the chunkwise one.

S_t = diag(a_t) S_{t-1} + k̂_t v̂_tᵀ,    o_t = scale · S_tᵀ q̂_t
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.heads import per_value_head, scaled, working_dtype
from fastweights.ops.segments import Segments


def recurrent_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_decay`, all documents side by side: o ``[B, T, Hv, V]`` in v's dtype and S ``[R, Hv, K, V]``; differentiable."""
    B, T, Hv, V = v.shape
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    segments = None if cu_seqlens is None else Segments.of(B, T, cu_seqlens, chunk=1)
    real = working_dtype(q)
    S = v.new_zeros((rows, Hv, k.shape[3], V), dtype=real) if state is None else state.to(real)
    S = S if segments is None else segments.sort(S)

    reads, ended = [], []
    for q_, k_, v_, a in zip(
        *(_moments(x, segments) for x in (*scaled(q, k, v, coef, scale), _gates(coef.log_decay, v, real))), strict=False
    ):
        if len(q_) < len(S):
            ended.append(S[len(q_) :])
            S = S[: len(q_)]
        S = torch.addcmul(S if a is None else S * a.mT, k_.mT, v_)
        reads.append(q_ @ S)
    if not reads:
        return torch.empty_like(v), S.clone()
    if segments is None:
        return torch.cat(reads, dim=2).transpose(1, 2).to(v.dtype), S
    return segments.join(torch.cat(reads), v.dtype), segments.unsort(torch.cat([S, *reversed(ended)]))


def _moments(x: Tensor | None, segments: Segments | None) -> Iterable[Tensor | None]:
    """At each moment the tokens of the rows that still have one, ``[rows, Hv, 1, …]``."""
    if x is None:
        return repeat(None)
    if segments is None:
        return x.unsqueeze(3).unbind(1)
    tokens = segments.cut(x)
    return [tokens[step] for step in segments.steps]


@torch.no_grad()
def decay_step_(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """`recurrent_decay` for inference: overwrites ``state [B, Hv, K, V]`` and returns o ``[B, T, Hv, V]`` in v's dtype; no gradients."""
    q_, k_, v_ = scaled(q, k, v, coef, scale)
    a = _gates(coef.log_decay, v, q_.dtype)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(v.shape[1]):
        if a is not None:
            state *= a[:, t].unsqueeze(-1)
        state.addcmul_(k_[:, t].unsqueeze(-1), v_[:, t].unsqueeze(-2))
        o[:, t] = (q_[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return o


def _gates(log_decay: Tensor | None, v: Tensor, dtype: torch.dtype) -> Tensor | None:
    """a ``[B, T, Hv, 1 or K]``."""
    if log_decay is None:
        return None
    return (log_decay.unsqueeze(-1) if log_decay.dim() == 3 else per_value_head(log_decay, 2, v.shape[2])).to(dtype).exp()
