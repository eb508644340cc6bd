"""Projections of one input, side by side where they can be."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastweights import ops
from fastweights.layers.silu import silu


def project(x: Tensor, *projections: Any) -> tuple[Tensor, ...]:
    """``x [B, T, D]``, or ``[B, T, H, V]`` by heads, through each of one or two projections."""
    if plain(*projections):
        return ops.linears(x, tuple(p.weight for p in projections))
    return tuple(p(x.flatten(2)) for p in projections)


def project_gated(x: Tensor, gate: Any, up: Any) -> Tensor:
    """SiLU(gate x) · up x."""
    y = ops.gated_linears(x, gate.weight, up.weight) if plain(gate, up) else None
    return silu(gate(x)) * up(x) if y is None else y


def plain(*projections: nn.Module) -> bool:
    """Are they no more than their weights? An adapter in their place, or whoever hooks into them, is asked itself."""
    return all(
        type(p) is nn.Linear
        and type(p.weight) in (nn.Parameter, Tensor)  # quantised weights are of types of their own
        and p.bias is None
        and "forward" not in vars(p)
        and not (p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks)
        for p in projections
    )
