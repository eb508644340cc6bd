"""What a write rule is: from a token's hidden state, key and value, the coefficients of one of the two recurrences."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights import ops
from fastweights.notation import Coefficients, Hidden, Key, PerHead, Query, Value
from fastweights.options import build_options
from fastweights.precision import Float32Module


def inverse_norm(x: Tensor, eps: float) -> Tensor:
    """1/√(‖x‖² + ε) over the last dimension, in float32 (float64 for float64). ε is in the sum, so a zero vector gives 1/√ε."""
    return torch.rsqrt(ops.head_dots(x) + eps)


class WriteRule(Float32Module):
    """A write rule. All its parameters are gates, so all of them act in float32.

    Options are given by name and described by the rule's ``Options``; ``docs/rules.md`` has every equation.
    """

    name: ClassVar[str]
    family: ClassVar[Literal["delta", "decay"]]
    """Which recurrence of `fastweights.ops` the coefficients are for."""
    Options: ClassVar[type]

    q_norm: str = "none"
    """``"l2"``: queries are read as q/√(‖q‖²+ε). ``"none"``: as they come."""
    keys_bounded: bool = False
    """Are written keys at most 1 in norm?"""
    head_decay: bool = False
    """Is log_decay one number a head, so that the read may forget at the same pace?"""
    key_scale_per_value_head: bool = False
    """Do value heads that share a key write it at different lengths?"""

    def __init__(self, *, hidden_size: int, num_heads: int, num_value_heads: int, head_k_dim: int, head_v_dim: int, **options) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_value_heads = num_value_heads
        self.head_k_dim = head_k_dim
        self.head_v_dim = head_v_dim
        self.options = build_options(f"write rule {self.name!r}", self.Options, options)

    def forward(self, x: Hidden, k: Key, v: Value, position: Int[Tensor, "B T"]) -> Coefficients:
        """Coefficients in float32 for hidden states ``x [B, T, D]``, ``k [B, T, Hk, K]``, ``v [B, T, Hv, V]``.

        ``position [B, T]`` is each token's place in its document, counted from 0.
        """
        raise NotImplementedError

    def query_scale(self, q: Query) -> PerHead | None:
        """1/√(‖q‖²+ε) per key head where the rule normalises queries, else None."""
        return inverse_norm(q, self.options.eps) if self.q_norm == "l2" else None

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items())
