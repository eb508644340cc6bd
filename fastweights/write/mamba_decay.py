"""Mamba's forget gate, shared by the rules that have one decay a head.

    Δ = softplus(W x + dt_bias),   log a = −exp(A_log)·Δ

Source: Gu & Dao, Mamba (arXiv 2312.00752); Dao & Gu, Mamba-2 (arXiv 2405.21060).
A starts uniform in (0, 16), Δ log-uniform in [1e-3, 1e-1].
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.notation import Hidden, PerHead
from fastweights.precision import Float32Linear, Float32Module, at_least_float32

A_MAX = 16.0
DT_RANGE = (1e-3, 1e-1)


class MambaDecay(Float32Module):
    """``x [B, T, D]`` -> ``(log_decay [B, T, heads], Δ [B, T, heads])``, float32."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.proj = Float32Linear(hidden_size, heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            # uniform_ may draw 0, whose log is −inf: the smallest draw above it is A_MAX·2⁻²⁴.
            self.A_log.uniform_(0, A_MAX).clamp_(min=A_MAX * 2**-24).log_()
            dt = self.dt_bias.uniform_(math.log(DT_RANGE[0]), math.log(DT_RANGE[1])).exp_()
            dt.add_(torch.log(-torch.expm1(-dt)))  # softplus⁻¹(Δ) = Δ + log(1 − exp(−Δ))

    def forward(self, x: Hidden) -> tuple[PerHead, PerHead]:
        dt = F.softplus(self.proj(x) + at_least_float32(self.dt_bias))
        return -at_least_float32(self.A_log).exp() * dt, dt
