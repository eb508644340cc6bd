"""The ``decay`` recurrence token by token: the form for one token or a few, as in decoding, and a check on the chunkwise one.

S_t = diag(a_t) S_{t-1} + k̂_t v̂_tᵀ,    o_t = scale · S_tᵀ q̂_t
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor

from fastweights.notation import Coefficients
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
    operands = _operands(q, k, v, coef, scale)
    S = operands[0].new_zeros(rows, Hv, k.shape[3], V) if state is None else state.to(operands[0].dtype)
    S = S.clone() if segments is None else segments.sort(S)

    def moments(x: Tensor | None) -> Iterable[Tensor | None]:
        """At each moment the tokens of the rows that still have one, ``[rows, Hv, 1, …]``."""
        if x is None:
            return repeat(None, T)
        if segments is None:
            return x.unsqueeze(3).unbind(1)
        tokens = segments.cut(x)
        return [tokens[step] for step in segments.steps]

    reads, ended = [], []
    for q_, k_, v_, a in zip(*map(moments, operands), strict=False):
        if len(q_) < len(S):
            ended.append(S[len(q_) :])
            S = S[: len(q_)]
        S = torch.addcmul(S if a is None else S * a.mT, k_.mT, v_)
        reads.append(q_ @ S)
    if not reads:
        return torch.empty_like(v), S
    if segments is None:
        return torch.cat(reads, dim=2).transpose(1, 2).to(v.dtype), S
    return segments.join(torch.cat(reads), v.dtype), segments.unsort(torch.cat([S, *reversed(ended)]))


@torch.no_grad()
def decay_step_(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """`recurrent_decay` for inference: overwrites ``state [B, Hv, K, V]`` and returns o ``[B, T, Hv, V]`` in v's dtype; no gradients."""
    q_, k_, v_, a = _operands(q, k, v, coef, scale)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(v.shape[1]):
        if a is not None:
            state *= a[:, t].unsqueeze(-1)
        state.addcmul_(k_[:, t].unsqueeze(-1), v_[:, t].unsqueeze(-2))
        o[:, t] = (q_[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return o


def _operands(q, k, v, coef: Coefficients, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """scale·q̂, k̂, v̂ ``[B, T, Hv, …]`` and the gates ``[B, T, Hv, 1 or K]``, in the precision of the state."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = v.shape[2]

    def per_value_head(x: Tensor) -> Tensor:
        return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)

    def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
        x = per_value_head(x.to(dtype))
        return x if factor is None else x * per_value_head(factor).unsqueeze(-1)

    a = coef.log_decay
    if a is not None:
        a = (a.unsqueeze(-1) if a.dim() == 3 else per_value_head(a)).to(dtype).exp()
    q = scaled(q, coef.query_scale)
    return q if scale == 1.0 else q * scale, scaled(k, coef.key_scale), scaled(v, coef.value_scale), a
