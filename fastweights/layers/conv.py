"""The short convolution in front of q, k and v."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights import ops
from fastweights.notation import CuSeqlens


class ShortConv(nn.Module):
    """Depthwise causal convolution and SiLU, ``[B, T, channels] -> [B, T, channels]``; with size 0 only the SiLU, and no state."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        self.weight = nn.Parameter(torch.empty(channels, size)) if size else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.uniform_(self.weight, -1 / math.sqrt(self.size), 1 / math.sqrt(self.size))  # as nn.Conv1d does

    def initial_state(self, rows: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor | None:
        """The zeros before the first token ``[R, size − 1, channels]``."""
        return None if self.weight is None else torch.zeros(rows, self.size - 1, self.channels, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, state: Tensor | None = None, cu_seqlens: CuSeqlens | None = None) -> tuple[Tensor, Tensor | None]:
        if self.weight is None:
            return F.silu(x), None
        return ops.causal_conv(x, self.weight, state=state, cu_seqlens=cu_seqlens)

    def step_(self, x: Tensor, state: Tensor | None) -> Tensor:
        """`forward` for a few tokens, for inference: overwrites ``state``; no gradients."""
        if self.weight is None or state is None:
            return F.silu(x)
        return ops.causal_conv_step_(x, self.weight, state)

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.size}"
