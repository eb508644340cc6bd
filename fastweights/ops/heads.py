"""What every form does to its operands first: one precision to work in, and a key head repeated for each of its value heads."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.notation import Coefficients


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where one of them is, else float32."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def per_value_head(x: Tensor, dim: int, heads: int) -> Tensor:
    """x with ``heads`` value heads along ``dim``, where it has those or key heads."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def per_own_head(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Its transpose, for gradients: the sum over the value heads that share each of ``heads`` along ``dim``."""
    return x if x.shape[dim] == heads else x.unflatten(dim, (heads, -1)).sum(dim + 1)


def as_written(k: Tensor, coef: Coefficients) -> Tensor:
    """k̂ = key_scale·k, in k's dtype ``[B, T, Hk, K]``; the scale is per key head."""
    return k if coef.key_scale is None else (k * coef.key_scale.unsqueeze(-1)).to(k.dtype)


def scaled(q: Tensor, k: Tensor, v: Tensor, coef: Coefficients, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """scale·q̂, k̂, v̂ ``[B, T, Hv, …]`` in the working precision."""
    dtype, heads = working_dtype(q), v.shape[2]
    q, k, v = (
        _times(per_value_head(x.to(dtype), 2, heads), factor)
        for x, factor in ((q, coef.query_scale), (k, coef.key_scale), (v, coef.value_scale))
    )
    return q if scale == 1.0 else q * scale, k, v


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * per_value_head(factor, 2, x.shape[2]).unsqueeze(-1)
