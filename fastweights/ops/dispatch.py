"""The only place that picks form and backend of a recurrence; `explain` says what would run, and why.

Forms: a batch of a few tokens goes through the recurrent form, all else through the chunkwise one. Backends: "reference" (the loop that
defines the op), "torch" (anywhere), "triton" (CUDA, or the CPU under Triton's interpreter when asked for). "auto" takes Triton where it can
run and has proved right on a card, else torch.

A Triton twin lives in ``ops/<family>/chunk_triton.py`` as ``chunk_<family>_triton`` with the signature of every form, and in
``ops/<family>/step_triton.py`` as ``<family>_step_triton_``. Each of the two modules says what its kernels cannot take in
``why_not(q, k, v, coef) -> str | None``, and so does that of `delta_ccq_step_`. They are imported when first needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.checks import check_memory
from fastweights.ops.decay.chunk import chunk_decay
from fastweights.ops.decay.recurrent import decay_step_ as decay_step_torch_
from fastweights.ops.decay.recurrent import recurrent_decay
from fastweights.ops.delta.chunk import chunk_delta
from fastweights.ops.delta.recurrent import delta_step_ as delta_step_torch_
from fastweights.ops.delta.recurrent import recurrent_delta
from fastweights.ops.reference import reference_decay, reference_delta
from fastweights.precision import outside_autocast

BACKENDS = ("auto", "reference", "torch", "triton")
FEW = 4
"""Up to this many tokens the recurrent form is the faster one."""

_PACKAGES = {name: importlib.import_module(f"fastweights.ops.{name}") for name in ("delta", "decay", "ccq", "conv", "token")}

_FORMS: dict[tuple[str, str], Callable[..., Any]] = {
    ("delta", "reference"): reference_delta,
    ("delta", "recurrent"): recurrent_delta,
    ("delta", "chunk"): chunk_delta,
    ("delta", "step"): delta_step_torch_,
    ("decay", "reference"): reference_decay,
    ("decay", "recurrent"): recurrent_decay,
    ("decay", "chunk"): chunk_decay,
    ("decay", "step"): decay_step_torch_,
}


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The ``delta`` family: S̃ = a_t S_{t-1}; S_t = S̃ + β_t k̂_t (v̂_t − S̃ᵀk̂_t)ᵀ; o_t = scale · S_tᵀ q̂_t.

    Args:
        q, k: ``[B, T, Hk, K]`` and v ``[B, T, Hv, V]``, one dtype.
        coef: the write rule's coefficients, float32 (float64 where q is).
        scale: factor on the read.
        state: the memory to start from ``[R, Hv, K, V]``, float32 (float64 where q is); None is an empty one.
        cu_seqlens: bounds of the documents packed into one row ``[documents + 1]``, int; then B = 1 and R is the number of documents.
        backend: "auto", "reference", "torch" or "triton".
        validate: read and check values on a device that is not the CPU too (this waits for it).

    Returns:
        o ``[B, T, Hv, V]`` in v's dtype and the new state, a fresh tensor. Both are differentiable in every operand.

    Raises:
        ValueError: for operands that do not fit (see `fastweights.ops.checks`), or a backend that cannot run them.
    """
    return _run("delta", q, k, v, coef, scale, state, cu_seqlens, backend, validate)


def decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    validate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The ``decay`` family: S_t = diag(a_t) S_{t-1} + k̂_t v̂_tᵀ; o_t = scale · S_tᵀ q̂_t. Everything else is as in `delta`."""
    return _run("decay", q, k, v, coef, scale, state, cu_seqlens, backend, validate)


def delta_step_(
    q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0, backend: str = "auto", validate: bool = False
) -> Tensor:
    """A few tokens of `delta`, for inference: overwrites ``state [B, Hv, K, V]`` and returns o ``[B, T, Hv, V]``; no gradients."""
    return _step("delta", q, k, v, coef, state, scale, backend, validate)


def decay_step_(
    q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, state: Tensor, *, scale: float = 1.0, backend: str = "auto", validate: bool = False
) -> Tensor:
    """A few tokens of `decay`, for inference: overwrites ``state [B, Hv, K, V]`` and returns o ``[B, T, Hv, V]``; no gradients."""
    return _step("decay", q, k, v, coef, state, scale, backend, validate)


def explain(
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> str:
    """What `delta` or `decay` (``family``) would run for these operands, and why; or "delta_ccq_step_". Raises as they would."""
    if family == "delta_ccq_step_":
        check_memory("delta", q, k, v, coef)
        why_not = why_not_step("delta", "ccq_step", backend, q, k, v, coef)
        how = "two steps, ccq_step_ and delta_step_" if why_not else "one launch, triton backend"
        return f"{family}: {how}: {why_not or _why_triton(backend)}"
    if family not in ("delta", "decay"):
        raise ValueError(
            f"family must be 'delta' or 'decay' (a write rule's is `WRITE_RULES[name].family`), or 'delta_ccq_step_'; got {family!r}"
        )
    check_memory(family, q, k, v, coef, cu_seqlens=cu_seqlens)
    form, backend, reason = _choose(family, q, k, v, coef, cu_seqlens, backend)
    return f"{family}: {form} form, {backend} backend: {reason}"


def _run(family, q, k, v, coef, scale, state, cu_seqlens, backend, validate):
    check_memory(family, q, k, v, coef, state=state, cu_seqlens=cu_seqlens, validate=validate)
    form, backend, _ = _choose(family, q, k, v, coef, cu_seqlens, backend)
    call = _triton_form(family, form) if backend == "triton" else _FORMS[family, form]
    with outside_autocast(q):
        o, state = call(q, k, v, coef, scale=scale, state=state, cu_seqlens=cu_seqlens)
    return o.to(v.dtype), state


def _step(family, q, k, v, coef, state, scale, backend, validate):
    check_memory(family, q, k, v, coef, state=state, validate=validate)
    call = _triton_form(family, "step") if why_not_step(family, "step", backend, q, k, v, coef) is None else _FORMS[family, "step"]
    with outside_autocast(q):
        return call(q, k, v, coef, state, scale=scale)


def _choose(family, q, k, v, coef, cu_seqlens, backend) -> tuple[str, str, str]:
    """Form, backend and the reason for them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "reference":
        return "reference", "reference", "asked for"
    if backend == "torch":
        why_not = "asked for"
    else:
        refusal = why_not_triton(family, "chunk", backend, q, k, v, coef)
        if refusal is None:
            return "chunk", "triton", _why_triton(backend)
        why_not = refusal
    few = cu_seqlens is None and q.shape[1] <= FEW
    return ("recurrent" if few else "chunk"), "torch", why_not


def _why_triton(backend: str) -> str:
    return "asked for" if backend == "triton" else "its kernels take these operands"


def why_not_step(family: str, form: str, backend: str, *operands: Any) -> str | None:
    """`why_not_triton` for a step, which has no reference backend."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend of a step must be one of auto, torch, triton; got {backend!r}")
    return "torch was asked for" if backend == "torch" else why_not_triton(family, form, backend, *operands)


def why_not_triton(family: str, form: str, backend: str, *operands: Any) -> str | None:
    """Why Triton cannot run this form for these operands, q first; None if it can. Raises where Triton was asked for and cannot."""
    q, reason = operands[0], None
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (q.is_cuda or interpreted):
        reason = f"Triton kernels need CUDA tensors (or TRITON_INTERPRET=1 and backend='triton'), and q is on {q.device.type}"
    elif q.dtype == torch.float64:
        reason = "Triton kernels take float16, bfloat16 and float32, and q is float64"
    else:
        module = twin(family, form)
        reason = module if isinstance(module, str) else module.why_not(*operands)
    if reason is not None and backend == "triton":
        raise ValueError(f"backend='triton' cannot run this: {reason}")
    return reason


def _triton_form(family: str, form: str) -> Callable[..., Any]:
    name = f"{family}_step_triton_" if form == "step" else f"{form}_{family}_triton"
    return getattr(twin(family, form), name)


def twin(family: str, form: str) -> ModuleType | str:
    """The module of the Triton twin, or why there is none."""
    missing = _import_twin(family, form)
    return getattr(_PACKAGES[family], f"{form}_triton") if missing is None else missing


def _import_twin(family: str, form: str) -> str | None:
    """Makes the twin an attribute of its package, where torch.compile can find it; or says why there is none."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    module = f"fastweights.ops.{family}.{form}_triton"
    if importlib.util.find_spec(module) is None:
        return f"{form}_{family} has no Triton twin yet"
    importlib.import_module(module)
    return None


# What torch.compiler.assume_constant_result does, without importing torch._dynamo, and with it Triton, for everyone who imports us.
_import_twin._dynamo_marked_constant = True  # type: ignore[attr-defined]
