"""Kaczmarz Linear Attention: the delta rule with the step that online regression asks for.

    S̃ = a_t S_{t-1},   S_t = S̃ + η_t/(‖k_t‖²+ε) · k_t (v_t − S̃ᵀ k_t)ᵀ,   η = σ(W_b x + b),   a as in Mamba-2

k comes as it is; q is L2-normalised. Canonical form, exact: with n = √(‖k‖²+ε), write k/n and v/n with β = η. Then ‖k̂‖ < 1, 1/ε is never
formed, and v/n never stored in half precision. Proof: η/n² · k (v − S̃ᵀk)ᵀ = η (k/n) (v/n − S̃ᵀ(k/n))ᵀ.

Source: Zou, Ren & Liu, Kaczmarz Linear Attention (arXiv 2605.08587). Their code forms η/(‖k‖²+ε) in the model's dtype and passes it as β;
the ablations of their tables are options here.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F

from fastweights import ops
from fastweights.notation import Coefficients, Key, PerHead, Value
from fastweights.options import check_between, check_choice, check_flag
from fastweights.precision import Float32Linear, at_least_float32, for_gates
from fastweights.write.base import WriteRule, inverse_norm
from fastweights.write.mamba_decay import MambaDecay


def kaczmarz(k: Key, v: Value, eta: PerHead, eps: float = 1e-6) -> tuple[Key, Value, PerHead]:
    """KLA's write in canonical form: ``(k/n, v/n, η)`` with n = √(‖k‖²+ε), for the delta rule with β = η.

    ``k [B, T, Hk, K]``, ``v [B, T, Hv, V]`` with Hv a multiple of Hk (else ValueError), ``eta [B, T, Hv]``; k̂, v̂ are float32, or float64.
    """
    Hk, Hv = k.shape[2], v.shape[2]
    if Hv % Hk:
        raise ValueError(f"v has {Hv} heads and k has {Hk}; the heads of v must be a multiple of those of k")
    inverse_n = inverse_norm(k, eps)
    k_hat = at_least_float32(k) * inverse_n.unsqueeze(-1)
    v_hat = at_least_float32(v) * inverse_n.repeat_interleave(Hv // Hk, dim=2).unsqueeze(-1)
    return k_hat, v_hat, eta


SEQUENCE_FACTORS = {
    "none": None,
    "1/t": lambda t: 1 / t,
    "1/sqrt(t)": lambda t: torch.rsqrt(t),
    "1/log(1+t)": lambda t: 1 / torch.log1p(t),
}


class KLA(WriteRule):
    name = "kla"
    family = "delta"
    head_decay = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        relaxation: bool = True
        """Learn η = eta_max·σ(W_b x + b). False: η ≡ 1, the full projection."""
        key_norm: str = "kaczmarz"
        """``kaczmarz``: n² = ‖k‖²+ε. ``learned``: n² = softplus(c)‖k‖²+ε, one c a key head, softplus(c) = 1 at first. ``none``: n = 1."""
        sequence_factor: str = "none"
        """A factor on η by the token's place t = 1, 2, … in its document: ``none``, ``1/t``, ``1/sqrt(t)``, ``1/log(1+t)``."""
        q_norm: str = "l2"
        """``l2`` or ``none``. The authors' rows without relaxation, "1/t only", "learned" and "none" leave q as it comes."""
        single_gate: bool = False
        """Forget by what is written: a = 1 − σ(W_b x + b), and no decay of Mamba's."""
        eta_max: float = 1.0
        """Upper end of η, from 1 to 2; above 1 the projection is over-relaxed and may overshoot."""
        eps: float = 1e-6
        """ε in ‖k‖²+ε, and in the norm of q. The gradient at ‖k‖ → 0 is of order η/ε."""

        def __post_init__(self) -> None:
            check_flag("relaxation", self.relaxation)
            check_choice("key_norm", self.key_norm, ("kaczmarz", "learned", "none"))
            check_choice("sequence_factor", self.sequence_factor, tuple(SEQUENCE_FACTORS))
            check_choice("q_norm", self.q_norm, ("l2", "none"))
            check_flag("single_gate", self.single_gate)
            check_between("eta_max", self.eta_max, 1.0, 2.0)
            check_between("eps", self.eps, 0.0, float("inf"), open_ends=True)
            if self.single_gate and not self.relaxation:
                raise ValueError("single_gate=True derives the decay from η, so it needs relaxation=True")
            if self.eta_max > 1 and not self.relaxation:
                raise ValueError(f"eta_max={self.eta_max} has no effect with relaxation=False, where η is 1; use eta_max=1")
            # The write contracts while η·f(t)·‖k̂‖² < 2; these three each break that bound or the meaning of 1 − η.
            if self.eta_max > 1 and self.sequence_factor == "1/log(1+t)":
                raise ValueError(
                    f"eta_max={self.eta_max} with sequence_factor='1/log(1+t)': the factor is 1/log 2 > 1 at the first token; use eta_max=1"
                )
            if self.eta_max > 1 and self.key_norm != "kaczmarz":
                raise ValueError(
                    f"eta_max={self.eta_max} needs key_norm='kaczmarz', which bounds the written key; key_norm is {self.key_norm!r}"
                )
            if self.eta_max > 1 and self.single_gate:
                raise ValueError(f"eta_max={self.eta_max} with single_gate=True: the decay 1 − η would be negative; use eta_max=1")

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        options = self.options
        self.q_norm = options.q_norm
        self.keys_bounded = options.key_norm == "kaczmarz"
        self.eta_proj = Float32Linear(self.hidden_size, self.num_value_heads) if options.relaxation else None
        self.decay = None if options.single_gate else MambaDecay(self.hidden_size, self.num_value_heads)
        self.norm_weight = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32)) if options.key_norm == "learned" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.norm_weight is not None:
            nn.init.constant_(self.norm_weight, math.log(math.e - 1))  # softplus⁻¹(1)

    def forward(self, x, k, v, position) -> Coefficients:
        x = for_gates(x)  # once for both projections
        if self.eta_proj is None:
            eta = at_least_float32(x.new_ones(*x.shape[:2], self.num_value_heads))
        else:
            logit = self.eta_proj(x)
            eta = self.options.eta_max * logit.sigmoid()
        factor = SEQUENCE_FACTORS[self.options.sequence_factor]
        if factor is not None:
            eta = eta * factor((position + 1).to(eta.dtype)).unsqueeze(-1)
        log_decay = F.logsigmoid(-logit) if self.decay is None else self.decay(x)[0]
        inverse_n = self._inverse_norm(k)
        return Coefficients(beta=eta, log_decay=log_decay, key_scale=inverse_n, value_scale=inverse_n)

    def _inverse_norm(self, k: Key) -> PerHead | None:
        if self.options.key_norm == "none":
            return None
        if self.norm_weight is None:
            return inverse_norm(k, self.options.eps)
        return torch.rsqrt(F.softplus(at_least_float32(self.norm_weight)) * ops.head_dots(k) + self.options.eps)
