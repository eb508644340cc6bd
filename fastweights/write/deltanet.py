"""DeltaNet: replace what the memory holds at a key, by a learned part.

    S_t = S_{t-1} + β_t k̂_t (v_t − S_{t-1}ᵀ k̂_t)ᵀ,   k̂ = k/√(‖k‖²+ε),   β = eta_max·σ(W_b x)

Source: Schlag et al. (arXiv 2102.11174); Yang et al., DeltaNet (arXiv 2406.06484); eta_max = 2, which lets I − β k̂k̂ᵀ have negative
eigenvalues: Grazzi et al. (arXiv 2411.12537). Queries are L2-normalised too.
"""

from __future__ import annotations

import dataclasses

from fastweights.notation import Coefficients
from fastweights.options import check_between
from fastweights.precision import Float32Linear
from fastweights.write.base import WriteRule, inverse_norm


class DeltaNet(WriteRule):
    name = "deltanet"
    family = "delta"
    q_norm = "l2"
    keys_bounded = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        eta_max: float = 1.0
        """Upper end of β, from 1 to 2; above 1 the erase may overshoot."""
        eps: float = 1e-6
        """ε of the norms of k and q, added to the sum of squares."""

        def __post_init__(self) -> None:
            check_between("eta_max", self.eta_max, 1.0, 2.0)
            check_between("eps", self.eps, 0.0, float("inf"), open_ends=True)

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.beta_proj = Float32Linear(self.hidden_size, self.num_value_heads, bias=False)

    def forward(self, x, k, v, position) -> Coefficients:
        beta = self.options.eta_max * self.beta_proj(x).sigmoid()
        return Coefficients(beta=beta, key_scale=inverse_norm(k, self.options.eps))
