"""The Curvature-Conditioned Query: q'_t = q_t − λ_t Σ_t q_t, with Σ_t the covariance of the keys so far, kept centred.

    w_t = a_t w_{t-1} + 1,   d_t = k_t − μ_{t-1},   μ_t = μ_{t-1} + d_t / w_t,
    C_t = a_t C_{t-1} + c_t d_t d_tᵀ,   c_t = a_t w_{t-1} / w_t,   Σ_t = C_t / w_t

C is a ``decay`` memory with key d and value c·d, and C_t q_t its read. So are, with one key channel that is always 1, both w (value 1)
and μ − r: with gate c_t and value (k_t − r) / w_t, for any r. The r here is a number close to the keys, the mean that the sequence starts
from or else its first key; then all that is added up is of the size of the keys' spread, and no digits are lost when keys crowd. r changes
no result, so it has no gradient. docs/chunkwise.md proves the recursion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.notation import CCQState, Coefficients
from fastweights.ops import dispatch
from fastweights.ops.checks import (
    DTYPES,
    check_cu_seqlens,
    check_dtype,
    check_log_decay_sign,
    check_per_head,
    check_same_device,
    check_shape,
)
from fastweights.ops.heads import working_dtype

NEVER = 1e-30
"""Stands for the weight 0, so that its logarithm is finite."""

FUSED = 128
"""The largest K of the fused kernels. Beyond it, and with a mask or forgetting, the sums are `decay` memories on every backend."""


def ccq_query(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    *,
    key_scale: Tensor | None = None,
    log_decay: Tensor | None = None,
    mask: Tensor | None = None,
    unit_keys: bool = False,
    eps: float = 1e-6,
    state: CCQState | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, CCQState]:
    """Take out of each query, λ strong, the directions in which the keys so far vary: q' = q − λ Σ q.

    Args:
        q: queries ``[B, T, Hk, K]``, after their norm.
        k: keys ``[B, T, Hk, K]``; the moments are those of key_scale·k.
        lam: λ ``[B, T, Hk]``. At 0, q' is q bit for bit. With ‖k‖ ≤ 1 and 0 ≤ λ ≤ 2, I − λΣ contracts.
        key_scale: the write rule's factor on each key ``[B, T, Hk]``, so that k is never stored as written; None is 1. Not with unit_keys.
        log_decay: log of the weights' forget gate, ≤ 0 ``[B, T, Hk]``; None counts all keys alike.
        mask: False for tokens that do not count: they leave the state as it is, and their keys get no gradient; bool ``[B, T]``.
        unit_keys: use k / √(‖k‖² + eps).
        state: the moments to start from, float32 (float64 with float64 inputs); None is none. Rows are B, or the documents.
        cu_seqlens: bounds of the documents packed into one row ``[documents + 1]``; then B = 1.
        backend: "auto", "reference", "torch" or "triton", as for `fastweights.ops.decay`.

    Returns:
        q' ``[B, T, Hk, K]`` in q's dtype and the new state, fresh tensors; C is symmetric. Both are differentiable in q, k, lam, key_scale,
        log_decay and state (but the mean of an empty state, w = 0, is the mean of nothing, and is not looked at).

    Raises:
        ValueError: for operands that do not fit, or a backend that cannot run them.
    """
    check_query(q, k, lam, log_decay, mask, state, cu_seqlens)
    key_scale = _key_scale(k, key_scale, unit_keys, eps)
    if mask is None and log_decay is None and k.shape[-1] <= FUSED and _has_kernel("query", q, k, backend):
        kernels = dispatch.twin("ccq", "query")
        return kernels.ccq_query_triton(q, k, lam, key_scale=key_scale, state=state, cu_seqlens=cu_seqlens)  # type: ignore[union-attr]
    q_, k_, lam, log_decay = _operands(q, k, lam, log_decay, key_scale)
    B, T, H, K = k.shape
    if state is None:
        rows = B if cu_seqlens is None else len(cu_seqlens) - 1
        state = CCQState(k_.new_zeros(rows, H, K, K), k_.new_zeros(rows, H, K), k_.new_zeros(rows, H))
    if T == 0:
        return q.clone(), CCQState(*(x.clone() for x in state))
    if mask is not None:
        k_ = k_.where(mask[..., None, None], 0)
        log_decay = None if log_decay is None else log_decay.where(mask.unsqueeze(-1), 0)
    if T <= dispatch.FEW and mask is None and cu_seqlens is None:
        new, mean, weight = _by_token(k_, log_decay, state)
    else:
        new, mean, weight = _by_memories(k_, log_decay, mask, state, cu_seqlens, backend)
    coef = Coefficients(log_decay=log_decay, value_scale=new.share)
    read, C = dispatch.decay(q_, new.d, new.d, coef, state=state.covariance, cu_seqlens=cu_seqlens, backend=backend)
    return _clean(q_, read, lam, new.weight).to(q.dtype), CCQState((C + C.mT) / 2, mean, weight)


@torch.no_grad()
def ccq_step_(
    q: Tensor,
    k: Tensor,
    lam: Tensor,
    state: CCQState,
    *,
    key_scale: Tensor | None = None,
    log_decay: Tensor | None = None,
    unit_keys: bool = False,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """A few tokens of `ccq_query`, for inference: overwrites the tensors of ``state`` and returns q' ``[B, T, Hk, K]``; no gradients."""
    check_query(q, k, lam, log_decay, None, state, None)
    key_scale = _key_scale(k, key_scale, unit_keys, eps)
    if k.shape[1] == 0:
        return q.clone()
    if _has_kernel("step", q, k, backend):
        kernels = dispatch.twin("ccq", "step")
        return kernels.ccq_step_triton_(q, k, lam, state, log_decay=log_decay, key_scale=key_scale)  # type: ignore[union-attr]
    q_, k_, lam, log_decay = _operands(q, k, lam, log_decay, key_scale)
    new, mean, weight = _by_token(k_, log_decay, state)
    coef = Coefficients(log_decay=log_decay, value_scale=new.share)
    read = dispatch.decay_step_(q_, new.d, new.d, coef, state.covariance, backend=backend)
    state.mean.copy_(mean)
    state.weight.copy_(weight)
    return _clean(q_, read, lam, new.weight).to(q.dtype)


class _Tokens(NamedTuple):
    """What each token brings to C, and the weight that C is divided by when it is read."""

    d: Tensor
    """d_t ``[B, T, Hk, K]``."""
    share: Tensor
    """c_t ``[B, T, Hk]``."""
    weight: Tensor
    """w_t ``[B, T, Hk]``."""


def _by_token(k: Tensor, log_decay: Tensor | None, state: CCQState) -> tuple[_Tokens, Tensor, Tensor]:
    """The recursion as it stands, for a few tokens; also the mean and the weight after them."""
    mean, weight = state.mean, state.weight
    a = None if log_decay is None else log_decay.exp()
    tokens = []
    for t in range(k.shape[1]):
        left = weight if a is None else a[:, t] * weight
        weight = left + 1
        d = k[:, t] - mean
        mean = mean + d / weight.unsqueeze(-1)
        tokens.append(_Tokens(d, left / weight, weight))
    return _Tokens(*(torch.stack(parts, dim=1) for parts in zip(*tokens, strict=True))), mean, weight


def _by_memories(
    k: Tensor, log_decay: Tensor | None, mask: Tensor | None, state: CCQState, cu_seqlens: Tensor | None, backend: str
) -> tuple[_Tokens, Tensor, Tensor]:
    """The same for many tokens, w and μ − r as memories with one key channel that is always 1."""

    def remember(values: Tensor, log_decay: Tensor | None, value_scale: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        coef = Coefficients(log_decay=log_decay, value_scale=value_scale)
        means, last = dispatch.decay(one, one, values, coef, state=state.unsqueeze(-2), cu_seqlens=cu_seqlens, backend=backend)
        return means, last.squeeze(-2)

    rows = _Rows(k.shape[0], k.shape[1], cu_seqlens, k.device)
    one = k.new_ones(()).expand(*k.shape[:3], 1)
    counted = one if mask is None else one.where(mask[..., None, None], 0)
    weight, last_weight = remember(counted, log_decay, None, state.weight.unsqueeze(-1))
    weight = weight.squeeze(-1)
    left = rows.previous(weight, state.weight).clamp(min=NEVER).log()  # log(a_t w_{t-1})
    if log_decay is not None:
        left = left + log_decay
    # Each by way of its own logarithm: the gradient of 1 − σ has no digits where σ is near 1.
    fade = F.logsigmoid(left)
    share, fresh = fade.exp(), F.logsigmoid(-left).exp()  # c_t and 1 / w_t
    if mask is not None:
        share, fresh, fade = (x.where(mask.unsqueeze(-1), 0) for x in (share, fresh, fade))

    started = (state.weight > 0).unsqueeze(-1)
    r = state.mean.where(started, k.flatten(0, 1)[rows.first(mask)]).detach()
    start = (state.mean - r).where(started, 0)
    e = k - rows.spread(r)
    if mask is not None:
        e = e.where(mask[..., None, None], 0)
    mean, last_mean = remember(e, fade, fresh, start)
    last_mean = (r + last_mean).where(last_weight > 0, state.mean)
    return _Tokens(e - rows.previous(mean, start), share, weight), last_mean, last_weight.squeeze(-1)


class _Rows:
    """Which row of state each token belongs to."""

    def __init__(self, batch: int, tokens: int, cu_seqlens: Tensor | None, device: torch.device) -> None:
        self.packed = cu_seqlens is not None
        bounds = torch.arange(batch + 1, device=device) * tokens if cu_seqlens is None else cu_seqlens.to(device, torch.int64)
        self.count = len(bounds) - 1
        self.token = torch.arange(batch * tokens, device=device)
        """The tokens, counted through the batch ``[B · T]``; so are the next two."""
        self.row = torch.repeat_interleave(torch.arange(self.count, device=device), bounds.diff(), output_size=batch * tokens)
        self.before = torch.where(self.token == bounds[self.row], self.row, self.count + self.token - 1)
        """Where the token before each one is, in a list of the rows' states and then all tokens."""

    def spread(self, x: Tensor) -> Tensor:
        """``[R, …]`` to each of the row's tokens, ``[B, T, …]`` or ``[B, 1, …]``."""
        return x.index_select(0, self.row).unsqueeze(0) if self.packed else x.unsqueeze(1)

    def previous(self, x: Tensor, state: Tensor) -> Tensor:
        """x ``[B, T, …]`` one token earlier; at a row's first token, its state ``[R, …]``."""
        if self.packed:
            return torch.cat([state, x[0]]).index_select(0, self.before).unsqueeze(0)
        return torch.cat([state.unsqueeze(1), x[:, :-1]], dim=1)

    def first(self, mask: Tensor | None) -> Tensor:
        """The first token that counts in each row ``[R]``; any token for a row that has none."""
        last = len(self.token) - 1
        token = self.token if mask is None else self.token.where(mask.flatten(), last)
        return token.new_full((self.count,), last).scatter_reduce(0, self.row, token, "amin")


def _operands(q, k, lam, log_decay, key_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, scaled keys, λ and log_decay in the precision of the state."""
    real = working_dtype(q, k)
    k_ = k.to(real)
    if key_scale is not None:
        k_ = k_ * key_scale.to(real).unsqueeze(-1)
    return q.to(real), k_, lam.to(real), None if log_decay is None else log_decay.to(real)


def _key_scale(k: Tensor, key_scale: Tensor | None, unit_keys: bool, eps: float) -> Tensor | None:
    """The factor on each key ``[B, T, Hk]``."""
    if key_scale is None:
        return (k.to(working_dtype(k)).square().sum(-1) + eps).rsqrt() if unit_keys else None
    if unit_keys:
        raise ValueError("key_scale and unit_keys=True are both factors on a key; give one")
    B, T, Hk, _ = k.shape
    check_per_head("key_scale", key_scale, {"B": B, "T": T, "Hk": Hk}, ("Hk",))
    check_dtype("key_scale", key_scale, DTYPES)
    check_same_device(k=k, key_scale=key_scale)
    return key_scale


def _clean(q: Tensor, read: Tensor, lam: Tensor, weight: Tensor) -> Tensor:
    return torch.addcmul(q, read, (-lam / weight.where(weight > 0, 1)).unsqueeze(-1))


def _has_kernel(form: str, q: Tensor, k: Tensor, backend: str) -> bool:
    return backend in ("auto", "triton") and dispatch.why_not_triton("ccq", form, backend, q, k) is None


def check_query(q, k, lam, log_decay, mask, state: CCQState | None, cu_seqlens) -> None:
    sizes: dict[str, int] = {}
    check_shape("q", q, "B T Hk K", sizes)
    check_shape("k", k, "B T Hk K", sizes)
    check_per_head("lam", lam, sizes, ("Hk",))
    for name, x in (("q", q), ("k", k), ("lam", lam)):
        check_dtype(name, x, DTYPES)
    if log_decay is not None:
        check_per_head("log_decay", log_decay, sizes, ("Hk",))
        check_dtype("log_decay", log_decay, DTYPES)
        check_log_decay_sign(log_decay)
    if mask is not None:
        check_shape("mask", mask, "B T", sizes)
        check_dtype("mask", mask, (torch.bool,))
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"])
    if state is not None:
        sizes["R"] = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        for name, x, letters in zip(state._fields, state, ("R Hk K K", "R Hk K", "R Hk"), strict=True):
            check_shape(f"state.{name}", x, letters, sizes)
            check_dtype(f"state.{name}", x, (working_dtype(q, k),))
    check_same_device(q=q, k=k, lam=lam, log_decay=log_decay, mask=mask, **({} if state is None else state._asdict()))
