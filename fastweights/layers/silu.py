"""The activation of gates and of the feed-forward half."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def silu(x: Tensor) -> Tensor:
    """x·σ(x)."""
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return x * x.sigmoid()  # one kernel either way; of `F.silu` torch's compiler makes a costlier exponential
    return F.silu(x)
