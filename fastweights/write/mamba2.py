"""Mamba-2, as linear attention: a state space model with one decay a head, discretised with step Δ.

    S_t = exp(−A Δ_t) S_{t-1} + k_t (Δ_t v_t)ᵀ,   Δ_t = softplus(W x_t + dt_bias)

Source: Dao & Gu, Mamba-2 (arXiv 2405.21060); q, k, v are its C, B, x. The published block shares one group of B and C among all heads, adds
a skip D·x and gates before its norm: docs/rules.md lists what the shared shell does instead.
"""

from __future__ import annotations

import dataclasses

from fastweights.notation import Coefficients
from fastweights.write.base import WriteRule
from fastweights.write.mamba_decay import MambaDecay


class Mamba2(WriteRule):
    name = "mamba2"
    family = "decay"
    head_decay = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.decay = MambaDecay(self.hidden_size, self.num_value_heads)

    def forward(self, x, k, v, position) -> Coefficients:
        log_decay, dt = self.decay(x)
        return Coefficients(log_decay=log_decay, value_scale=dt)
