"""The root-mean-square norm, computed in float32 and returned in the input's dtype."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.silu import silu
from fastweights.precision import Float32Module, at_least_float32


class RMSNorm(Float32Module):
    """x / √(mean(x²) + ε) · weight over the last dimension, and · SiLU(gate) where a gate is given.

    On heads ``[B, T, H, V]`` it is head-wise, with one weight of size V for all heads. Source: Zhang & Sennrich (arXiv 1910.07467).
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Float[Tensor, "*batch size"], gate: Float[Tensor, "*batch size"] | None = None) -> Float[Tensor, "*batch size"]:
        y = at_least_float32(x)
        if gate is None and torch.compiler.is_compiling() and not torch.is_grad_enabled():
            # Written out, so that a sum in front of it, which others need too, is stored on the way.
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(y.dtype)
        else:
            y = F.rms_norm(y, (self.size,), self.weight.to(y.dtype), self.eps)
        if gate is not None:
            y = y * silu(at_least_float32(gate))
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"
