"""The ``delta`` recurrence token by token: the form for one token or a few, as in decoding, and a check on the chunkwise one.

S̃_t = a_t S_{t-1},    e_t = v̂_t − S̃_tᵀ k̂_t,    S_t = S̃_t + β_t k̂_t e_tᵀ,    o_t = scale · S_tᵀ q̂_t
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.heads import scaled
from fastweights.ops.segments import Segments


def recurrent_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_delta`, all documents side by side: o ``[B, T, Hv, V]`` in v's dtype and S ``[R, Hv, K, V]``; differentiable."""
    B, T, Hv, V = v.shape
    segments = Segments.of(B, T, cu_seqlens, chunk=1)
    q_, k_, v_, beta, a = _operands(q, k, v, coef, scale)
    q_, k_, v_ = segments.cut(q_), segments.cut(k_), segments.cut(v_)  # [tokens, Hv, 1, …]
    beta, a = (None if x is None else segments.cut(x) for x in (beta, a))
    S = v_.new_zeros(segments.rows, Hv, k.shape[3], V) if state is None else state.to(v_.dtype)
    S = segments.sort(S)
    reads, ended = [v_.new_empty(0, Hv, 1, V)], []
    for step in segments.steps:
        alive = step.stop - step.start
        if alive < len(S):
            ended.append(S[alive:])
            S = S[:alive]
        if a is not None:
            S = S * a[step]
        e = v_[step] - k_[step] @ S
        S = torch.addcmul(S, k_[step].mT, e if beta is None else beta[step] * e)
        reads.append(q_[step] @ S)
    o = segments.join(torch.cat(reads), v.dtype)
    return o, segments.unsort(torch.cat([S, *reversed(ended)]))


def delta_step_(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """`recurrent_delta` for inference: overwrites ``state [B, Hv, K, V]`` and returns o ``[B, T, Hv, V]`` in v's dtype."""
    return _step(q, k, v, *coef, state, scale)


@torch.library.custom_op("fastweights::delta_step_torch_", mutates_args=("state",))
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,
    state: Tensor,
    scale: float,
) -> Tensor:
    q_, k_, v_, beta, a = _operands(q, k, v, Coefficients(beta, log_decay, key_scale, value_scale, query_scale), scale)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for t in range(v.shape[1]):
        if a is not None:
            state *= a[:, t].unsqueeze(-1)
        e = v_[:, t].unsqueeze(-2) - k_[:, t].unsqueeze(-2) @ state
        if beta is not None:
            e *= beta[:, t].unsqueeze(-1)
        state.addcmul_(k_[:, t].unsqueeze(-1), e)
        o[:, t] = (q_[:, t].unsqueeze(-2) @ state).squeeze(-2)
    return o


@_step.register_fake
def _(q, k, v, beta, log_decay, key_scale, value_scale, query_scale, state, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _operands(q, k, v, coef: Coefficients, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """scale·q̂, k̂, v̂ ``[B, T, Hv, …]``, β and the gates ``[B, T, Hv, 1]``, in the precision of the state."""
    q, k, v = scaled(q, k, v, coef, scale)
    beta = None if coef.beta is None else coef.beta.to(q.dtype).unsqueeze(-1)
    a = None if coef.log_decay is None else coef.log_decay.to(q.dtype).exp().unsqueeze(-1)
    return q, k, v, beta, a
