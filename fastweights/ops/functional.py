"""The memories as plain functions: every coefficient an argument, nothing chosen by a rule."""

from __future__ import annotations

from torch import Tensor

from fastweights.notation import Coefficients, Memory, Value
from fastweights.ops import dispatch


def delta_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Value, Memory]:
    """A memory that erases before it writes: S̃ = a_t S_{t-1}; S_t = S̃ + β_t k̂_t (v̂_t − S̃ᵀk̂_t)ᵀ; o_t = scale · S_tᵀ q_t.

    Here a_t = exp(log_decay), k̂ = key_scale·k and v̂ = value_scale·v. Keys are taken as they come: β‖k̂‖² ≤ 2 keeps the memory bounded.

    Args:
        q, k: ``[B, T, Hk, K]``; v: ``[B, T, Hv, V]``, Hv a multiple of Hk. float16, bfloat16, float32 or float64.
        beta: write strength ``[B, T, Hv]``; it and all below float32 (float64 with float64 inputs).
        log_decay: log of the forget gate, ≤ 0, ``[B, T, Hv]``; None forgets nothing.
        key_scale, value_scale: ``[B, T, Hk]`` or ``[B, T, Hv]``; None is 1.
        scale: factor on the read.
        state: the memory to start from ``[R, Hv, K, V]``; None is an empty one. R is B, or the number of documents.
        cu_seqlens: bounds of documents packed into one row ``[documents + 1]``; needs B = 1.
        backend: "auto", "reference", "torch" or "triton".

    Returns:
        o ``[B, T, Hv, V]`` in v's dtype, and the memory after the last token ``[R, Hv, K, V]``.

    Raises:
        ValueError: naming the operand that does not fit, and what is allowed.
    """
    coef = Coefficients(beta=beta, log_decay=log_decay, key_scale=key_scale, value_scale=value_scale)
    return dispatch.delta(q, k, v, coef, scale=scale, state=state, cu_seqlens=cu_seqlens, backend=backend)


def decay_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Value, Memory]:
    """A memory that forgets and adds: S_t = diag(a_t) S_{t-1} + k̂_t v̂_tᵀ; o_t = scale · S_tᵀ q_t.

    ``log_decay`` is ``[B, T, Hv]``, or ``[B, T, Hk, K]``: one forget gate per key channel. Everything else is as in `delta_memory`.
    """
    coef = Coefficients(log_decay=log_decay, key_scale=key_scale, value_scale=value_scale)
    return dispatch.decay(q, k, v, coef, scale=scale, state=state, cu_seqlens=cu_seqlens, backend=backend)
