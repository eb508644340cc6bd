"""A few tokens of ``delta`` read through CCQ, the decode step of ``kla+ccq``: in one launch where a kernel can, else in two steps."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.notation import CCQState, Coefficients
from fastweights.ops import dispatch
from fastweights.ops.ccq.query import ccq_step_, check_query
from fastweights.ops.checks import check_memory, check_per_head
from fastweights.precision import outside_autocast


@torch.no_grad()
def delta_ccq_step_(
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
    backend: str = "auto",
    validate: bool = False,
) -> Tensor:
    """`ccq_step_` on the keys as written and then `delta_step_` with the cleaned query, for inference; no gradients.

    Args:
        q, k: ``[B, T, Hk, K]`` and v ``[B, T, Hv, V]``, one dtype. k is the key before ``coef.key_scale``.
        coef: the write rule's coefficients, as for `delta`. CCQ's keys are ``key_scale·k``, so unless ``unit_keys`` that scale must be
            per key head, ``[B, T, Hk]``.
        lam: λ ``[B, T, Hk]``.
        memory: S ``[B, Hv, K, V]``, overwritten.
        moments: CCQ's state, overwritten.
        forget: let CCQ's moments forget by ``coef.log_decay``, which is then per key head: Hv = Hk.
        unit_keys: take the covariance of k / √(‖k‖² + eps).
        scale: factor on the read.
        backend: "auto", "torch" or "triton".
        validate: read and check values on a device that is not the CPU too (this waits for it).

    Returns:
        o ``[B, T, Hv, V]`` in v's dtype. In one launch the cleaned query is never rounded to q's dtype.

    Raises:
        ValueError: for operands that do not fit, or a backend that cannot run them.
    """
    B, T, Hk, _ = k.shape
    if coef.key_scale is not None and not unit_keys:
        check_per_head("key_scale (unless unit_keys)", coef.key_scale, {"B": B, "T": T, "Hk": Hk}, ("Hk",))
    log_decay = coef.log_decay if forget else None
    if dispatch.why_not_step("delta", "ccq_step", backend, q, k, v, coef) is None:
        check_memory("delta", q, k, v, coef, state=memory, validate=validate)
        check_query(q, k, lam, log_decay, None, moments, None)
        step = dispatch.twin("delta", "ccq_step").delta_ccq_step_triton_  # type: ignore[union-attr]
        with outside_autocast(q):
            return step(q, k, v, coef, lam, memory, moments, forget=forget, unit_keys=unit_keys, eps=eps, scale=scale)
    key_scale = None if unit_keys else coef.key_scale
    q = ccq_step_(q, k, lam, moments, key_scale=key_scale, log_decay=log_decay, unit_keys=unit_keys, eps=eps, backend=backend)
    return dispatch.delta_step_(q, k, v, coef, memory, scale=scale, backend=backend, validate=validate)
