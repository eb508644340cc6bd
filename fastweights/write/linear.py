"""Linear attention: every write stays.

    S_t = S_{t-1} + k_t v_tᵀ

Source: Katharopoulos et al., Transformers are RNNs (arXiv 2006.16236). Theirs maps q and k through elu + 1 and divides by Σ_j φ(q)ᵀφ(k_j);
here the shared shell's SiLU and head-wise RMSNorm stand in for both.
"""

from __future__ import annotations

import dataclasses

from fastweights.notation import Coefficients
from fastweights.write.base import WriteRule


class Linear(WriteRule):
    name = "linear"
    family = "decay"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def forward(self, x, k, v, position) -> Coefficients:
        return Coefficients()
