"""Retention: a fixed decay a head.

    S_t = γ_h S_{t-1} + k_t v_tᵀ,   γ_h = 1 − 2^(−5−h)

Source: Sun et al., RetNet (arXiv 2307.08621). Theirs rotates q and k by position (xPos) and has no convolution.
"""

from __future__ import annotations

import dataclasses

import torch

from fastweights.notation import Coefficients
from fastweights.precision import at_least_float32
from fastweights.write.base import WriteRule


class Retention(WriteRule):
    name = "retention"
    family = "decay"
    head_decay = True

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def forward(self, x, k, v, position) -> Coefficients:
        # Made anew each call: a buffer would be one more thing to lose on the meta device or round in bfloat16.
        head = torch.arange(self.num_value_heads, device=x.device, dtype=at_least_float32(x[:0]).dtype)
        log_gamma = torch.log1p(-torch.exp2(-5 - head))
        return Coefficients(log_decay=log_gamma.expand(*x.shape[:2], -1))
