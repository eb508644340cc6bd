"""Next-token loss, without ever holding the logits of a whole sequence unless the caller wants them.

Why not `torch.nn.functional.linear_cross_entropy`: it is new in torch 2.13, and 2.11 is allowed here, so it would be a second way and not
another. And with bfloat16 operands, in 2.13, it also returns the loss in bfloat16: a sum over 8,192 tokens came out 2.5 % off. It casts
nothing under autocast, breaks the graph under torch.compile, and takes a weight where ours takes any head. In float32 it is better than
ours: docs/training.md has the figures. Once 2.13 is the oldest and the loss is float32, it should replace `token_losses`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastweights.notation import CuSeqlens, Hidden
from fastweights.precision import at_least_float32

IGNORE = -100
"""The label that asks for no prediction, as everywhere in PyTorch."""

CHUNK, GPU_CHUNK = 1024, 4096
"""Tokens whose logits exist at a time: 1,024 × 32,000 float32 numbers are 131 MB. A GPU gets more at once: of 1,024 it makes the logits
faster than the host can ask for them."""


def next_token_targets(
    labels: Int[Tensor, "B T"], attention_mask: Tensor | None = None, cu_seqlens: CuSeqlens | None = None
) -> Int[Tensor, "B T"]:
    """What each position is to predict: the next label, or `IGNORE` where there is no next token.

    There is none at the end of a row or a document, and none from or to a masked token: padding predicts nothing and is not predicted.
    """
    targets = F.pad(labels[:, 1:].long(), (0, 1), value=IGNORE)
    if cu_seqlens is not None:
        end = (cu_seqlens[1:].long() - 1) % labels.shape[1]  # of an empty document in front it is −1, which wraps to the row's end
        last = torch.zeros_like(targets, dtype=torch.bool).index_fill(1, end, True)
        targets = targets.masked_fill(last, IGNORE)
    if attention_mask is not None:
        real = attention_mask[:, attention_mask.shape[1] - labels.shape[1] :].bool()
        targets = targets.masked_fill(~(real & F.pad(real[:, 1:], (0, 1))), IGNORE)
    return targets


def losses_of_logits(logits: Float[Tensor, "*batch vocabulary"], targets: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """−log p(target) in nats, 0 where there is no target, from logits; in float32 (float64 for float64)."""
    losses = F.cross_entropy(at_least_float32(logits).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets.shape)


def token_losses(
    hidden: Hidden,
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, "B T"],
    losses: Callable[[Tensor, Tensor], Tensor] = losses_of_logits,
) -> Float[Tensor, "B T"]:
    """`losses_of_logits` without all logits at once. ``hidden [B, T, D]`` is the model's, ``head`` makes logits of it.

    ``losses`` makes losses of logits; a compiled `losses_of_logits` may take its place.

    Logits exist for `CHUNK` tokens at a time, `GPU_CHUNK` on a GPU. With gradients each chunk makes its logits again in the backward pass.
    """
    chunk = GPU_CHUNK if hidden.is_cuda else CHUNK
    pieces = zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True)

    def of_piece(x: Tensor, target: Tensor) -> Tensor:
        return losses(head(x), target)

    found = [checkpoint(of_piece, *piece, use_reentrant=False) if torch.is_grad_enabled() else of_piece(*piece) for piece in pieces]
    return torch.cat(found).view(targets.shape)
