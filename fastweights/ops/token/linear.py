"""Projections of the token that is decoded: with a single row, a product is the reading of its weights and nothing else."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops import dispatch


def linears(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``x [B, T, D]``, or ``[B, T, H, V]`` by heads, times each of one or two ``weights [N, D]``: ``[B, T, N]``. For a single token in half
    precision, one launch."""
    kernels = _kernels(x, weights)
    if kernels is None:
        return tuple(F.linear(x.flatten(2), weight) for weight in weights)
    y, z = kernels.matvec_triton(x, weights[0], weights[1] if len(weights) > 1 else None, False)
    return (y, z)[: len(weights)]


def gated_linears(x: Tensor, gate: Tensor, up: Tensor) -> Tensor | None:
    """SiLU(gate x) · up x ``[B, T, N]`` in one launch; None where there is no kernel for it."""
    kernels = _kernels(x, (gate, up)) if gate.shape == up.shape else None
    return None if kernels is None else kernels.matvec_triton(x, gate, up, True)[0]


def _kernels(x: Tensor, weights: tuple[Tensor, ...]) -> ModuleType | None:
    one = x.dim() >= 3 and x.shape[0] == 1 and x.shape[1] == 1 and x.dtype in (torch.bfloat16, torch.float16)
    if not (one and x.is_cuda and not torch.is_grad_enabled() and all(_fits(x, weight) for weight in weights)):
        return None
    kernels = dispatch.twin("token", "matvec")
    return None if isinstance(kernels, str) else kernels


def _fits(x: Tensor, weight: Tensor) -> bool:
    """The kernel takes addresses as they are; what does not fit is left to torch to refuse."""
    return weight.dtype == x.dtype and weight.device == x.device and weight.shape[1] == x.numel() and weight.is_contiguous()
