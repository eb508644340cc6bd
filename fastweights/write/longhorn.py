"""Longhorn: the exact implicit step of online regression, S_t = argmin_S ‖S − S̃‖² + β‖v_t − Sᵀk_t‖².

    S̃ = a_t S_{t-1},   S_t = S̃ + β/(1+β‖k‖²) · k_t (v_t − S̃ᵀ k_t)ᵀ,   β = σ(W_b x + b),   a as in Mamba-2

Canonical form: with n² = ‖k‖² + 1/β the step is k/n, v/n and β ← 1, so ‖k̂‖ < 1.
Source: Liu et al., Longhorn (arXiv 2407.14207). The published layer is a diagonal approximation per channel inside Mamba's block, without a
forget gate; this is the exact step per head with Mamba's gate and q as it comes, as the authors of KLA measure it (``qk_norm="longhorn"``
in the code of arXiv 2605.08587).
"""

from __future__ import annotations

import dataclasses

import torch

from fastweights import ops
from fastweights.notation import Coefficients
from fastweights.precision import Float32Linear, for_gates
from fastweights.write.base import WriteRule
from fastweights.write.mamba_decay import MambaDecay


class Longhorn(WriteRule):
    name = "longhorn"
    family = "delta"
    keys_bounded = True
    head_decay = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.beta_proj = Float32Linear(self.hidden_size, self.num_value_heads)
        self.decay = MambaDecay(self.hidden_size, self.num_value_heads)
        self.key_scale_per_value_head = self.num_value_heads != self.num_heads

    def forward(self, x, k, v, position) -> Coefficients:
        x = for_gates(x)  # once for both projections
        log_decay, _ = self.decay(x)
        # 1/β = 1 + exp(−logit). Where that would overflow, nothing is written and no gradient is due.
        inverse_beta = 1 + (-self.beta_proj(x)).clamp(max=60).exp()
        squared = ops.head_dots(k).repeat_interleave(self.num_value_heads // self.num_heads, dim=2)
        inverse_n = torch.rsqrt(squared + inverse_beta)
        return Coefficients(log_decay=log_decay, key_scale=inverse_n, value_scale=inverse_n)
