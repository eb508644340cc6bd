"""The truth: both recurrences as one loop over tokens, in float32 or float64, written to be read next to the equations.

    decay:  S_t = diag(a_t) S_{t-1} + k̂_t v̂_tᵀ
    delta:  S̃_t = a_t S_{t-1};   S_t = S̃_t + β_t k̂_t (v̂_t − S̃_tᵀ k̂_t)ᵀ
    read:   o_t = scale · S_tᵀ q̂_t,   after the write

Decay comes before the erase. Every faster form is tested against these two functions, in float64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fastweights.notation import Coefficients


def reference_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``decay`` family, token by token. Shapes as in `fastweights.notation`; returns ``o [B, T, Hv, V]`` and ``S [R, Hv, K, V]``."""
    return _loop(_decay_write, q, k, v, coef, scale, state, cu_seqlens)


def reference_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``delta`` family, token by token. Shapes as in `fastweights.notation`; returns ``o [B, T, Hv, V]`` and ``S [R, Hv, K, V]``."""
    return _loop(_delta_write, q, k, v, coef, scale, state, cu_seqlens)


def _decay_write(S: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor) -> Tensor:
    return a * S + k.unsqueeze(-1) * v.unsqueeze(-2)


def _delta_write(S: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor) -> Tensor:
    S = a * S
    error = v - torch.einsum("bhkv,bhk->bhv", S, k)
    return S + k.unsqueeze(-1) * (beta * error).unsqueeze(-2)


def _loop(write, q, k, v, coef, scale, state, cu_seqlens):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, T, _, K = k.shape
    Hv, V = v.shape[2], v.shape[3]
    G = Hv // k.shape[2]

    def per_value_head(x: Tensor) -> Tensor:
        return x if x.shape[2] == Hv else x.repeat_interleave(G, dim=2)

    def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
        x = per_value_head(x.to(dtype))
        return x if factor is None else x * per_value_head(factor.to(dtype)).unsqueeze(-1)

    q, k, v = scaled(q, coef.query_scale), scaled(k, coef.key_scale), scaled(v, coef.value_scale)
    beta = q.new_ones(B, T, Hv) if coef.beta is None else coef.beta.to(dtype)
    log_decay = q.new_zeros(B, T, Hv) if coef.log_decay is None else coef.log_decay.to(dtype)
    a = log_decay.exp().unsqueeze(-1) if log_decay.dim() == 3 else per_value_head(log_decay).exp()  # [B, T, Hv, 1 or K]

    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = B if cu_seqlens is None else len(bounds) - 1
    initial = q.new_zeros(rows, Hv, K, V) if state is None else state.to(dtype)
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(bounds)):
        S = initial if cu_seqlens is None else initial[document : document + 1]
        for t in range(start, end):
            S = write(S, k[:, t], v[:, t], a[:, t].unsqueeze(-1), beta[:, t].unsqueeze(-1))
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        finals.append(S)
    o = torch.stack(outputs, dim=1) if outputs else q.new_zeros(B, 0, Hv, V)
    return o, torch.cat(finals) if finals else initial
