"""Gated DeltaNet: DeltaNet that forgets first.

    S̃ = a_t S_{t-1},   S_t = S̃ + β_t k̂_t (v_t − S̃ᵀ k̂_t)ᵀ,   k̂ = k/√(‖k‖²+ε),   β = eta_max·σ(W_b x),   a as in Mamba-2

Source: Yang, Kautz & Hatamizadeh, Gated Delta Networks (arXiv 2412.06464). Queries are L2-normalised too.
"""

from __future__ import annotations

from fastweights.notation import Coefficients
from fastweights.precision import at_least_float32
from fastweights.write.deltanet import DeltaNet
from fastweights.write.mamba_decay import MambaDecay


class GatedDeltaNet(DeltaNet):
    name = "gated_deltanet"
    head_decay = True

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.decay = MambaDecay(self.hidden_size, self.num_value_heads)

    def forward(self, x, k, v, position) -> Coefficients:
        x = at_least_float32(x)  # once for both projections
        log_decay, _ = self.decay(x)
        return super().forward(x, k, v, position)._replace(log_decay=log_decay)
