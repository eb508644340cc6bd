"""The feed-forward half of a block."""

from __future__ import annotations

from torch import nn

from fastweights.layers.linear import project, project_gated
from fastweights.notation import Hidden


class SwiGLU(nn.Module):
    """W_down (SiLU(W_gate x) · W_up x), ``[B, T, D] -> [B, T, D]``. Source: Shazeer, GLU Variants (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Hidden) -> Hidden:
        return project(project_gated(x, self.gate_proj, self.up_proj), self.down_proj)[0]
