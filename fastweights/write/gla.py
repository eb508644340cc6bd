"""Gated linear attention: a decay of its own for every key channel.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ,   log a_t = logsigmoid(W₂ W₁ x_t + b) / 16,   W₁ of rank 16

Source: Yang et al., GLA (arXiv 2312.06635). Theirs has no convolution and no activation on q, k, v.
"""

from __future__ import annotations

import dataclasses

from torch.nn import functional as F

from fastweights.notation import Coefficients
from fastweights.precision import Float32Linear
from fastweights.write.base import WriteRule

RANK = 16
TEMPERATURE = 16.0


class GLA(WriteRule):
    name = "gla"
    family = "decay"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.decay_down = Float32Linear(self.hidden_size, RANK, bias=False)
        self.decay_up = Float32Linear(RANK, self.num_heads * self.head_k_dim)

    def forward(self, x, k, v, position) -> Coefficients:
        log_decay = F.logsigmoid(self.decay_up(self.decay_down(x))) / TEMPERATURE
        return Coefficients(log_decay=log_decay.unflatten(-1, (self.num_heads, self.head_k_dim)))
