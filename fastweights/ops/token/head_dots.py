"""Sums over the channels of a head: what norms, and gates that look at q, are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.notation import PerHead
from fastweights.ops import dispatch
from fastweights.precision import at_least_float32

MANY = 64
"""From so many tokens a row on it is memory that takes time; fewer are left to torch's compiler, which joins them with what follows."""


def head_dots(x: Tensor, weight: Tensor | None = None) -> PerHead:
    """Σ x² ``[B, T, H]`` of ``x [B, T, H, K]``, or Σ x·weight with ``weight [H, K]``; in float32 (float64 for float64)."""
    if x.is_cuda and x.dtype != torch.float64 and x.shape[1] >= MANY and (weight is None or not torch.is_grad_enabled()):
        kernels = dispatch.twin("token", "head_dots")
        if not isinstance(kernels, str):
            return kernels.head_dots_triton(x, weight)
    x = at_least_float32(x)
    # A product and a sum: autocast would round a matmul.
    return (x.square() if weight is None else x * weight.to(x.dtype)).sum(-1)
