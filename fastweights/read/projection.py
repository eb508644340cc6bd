"""A control for CCQ: take out of the query a share of one learned direction, whatever the keys are.

    λ_t = σ(w·q_t + b) a key head,   u = w / √(‖w‖² + ε),   q'_t = q_t − λ_t u uᵀq_t

As many parameters as CCQ's strength has (K + 1 a head), the same place in the layer, and no state: what it gains, a projection of the query
that has not seen the memory's keys gains. Ours, for experiments: nobody proposes it. λ sees q after its norm, as CCQ's does.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fastweights.notation import Coefficients
from fastweights.precision import at_least_float32
from fastweights.read.base import ReadRule, Write

EPS = 1e-6


class Projection(ReadRule):
    name = "projection"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def __init__(self, write: Write, **options) -> None:
        super().__init__(write, **options)
        self.weight = nn.Parameter(torch.empty(write.num_heads, write.head_k_dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(write.num_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)  # a direction needs a length; zeros would never move
        nn.init.zeros_(self.bias)

    def initial_state(self, rows, device=None, dtype=None) -> None:
        return None

    def forward(self, q, k, coef: Coefficients, *, operands=None, state=None, cu_seqlens=None, backend="auto") -> tuple[Tensor, None]:
        if state is not None:
            raise ValueError("the projection keeps no state, and was given one: it belongs to a layer with another read")
        wide = at_least_float32(q)
        w = self.weight.to(wide.dtype)
        along = (wide * w).sum(-1)
        logit = along if coef.query_scale is None else along * coef.query_scale
        share = (logit + self.bias.to(wide.dtype)).sigmoid() * along / (w.square().sum(-1) + EPS)
        return torch.addcmul(wide, share.unsqueeze(-1), w, value=-1).to(q.dtype), None

    def step_(self, q, k, coef: Coefficients, state, *, backend="auto") -> Tensor:
        return self.forward(q, k, coef)[0]
