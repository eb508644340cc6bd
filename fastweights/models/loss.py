"""Next-token loss, without ever holding the logits of a whole sequence unless the caller wants them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastweights.notation import CuSeqlens, Hidden

IGNORE = -100
"""The label that asks for no prediction, as everywhere in PyTorch."""

CHUNK = 1024
"""Tokens whose logits exist at a time: 1,024 × 32,000 float32 numbers are 131 MB."""


def next_token_targets(
    labels: Int[Tensor, "B T"], attention_mask: Tensor | None = None, cu_seqlens: CuSeqlens | None = None
) -> Int[Tensor, "B T"]:
    """What each position is to predict: the next label, or `IGNORE` where there is no next token.

    There is none at the end of a row or a document, and none from or to a masked token: padding predicts nothing and is not predicted.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if cu_seqlens is not None:
        end = (cu_seqlens[1:].long() - 1) % labels.shape[1]  # of an empty document in front it is −1, which wraps to the row's end
        last = torch.zeros_like(targets, dtype=torch.bool).index_fill(1, end, True)
        targets = targets.masked_fill(last, IGNORE)
    if attention_mask is not None:
        real = attention_mask[:, attention_mask.shape[1] - labels.shape[1] :].bool()
        targets = targets.masked_fill(~(real & F.pad(real[:, 1:], (0, 1))), IGNORE)
    return targets


def token_losses(hidden: Hidden, weight: Float[Tensor, "vocabulary D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """−log p(target) in nats, float32; 0 where there is no target. ``hidden [B, T, D]`` is the model's, ``weight`` the output projection's.

    Logits exist for `CHUNK` tokens at a time. With gradients each chunk makes its logits again in the backward pass.
    """
    B, T, _ = hidden.shape
    pieces = zip(hidden.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
    losses = [
        checkpoint(_chunk_losses, x, weight, target, use_reentrant=False) if torch.is_grad_enabled() else _chunk_losses(x, weight, target)
        for x, target in pieces
    ]
    return torch.cat(losses).view(B, T)


def _chunk_losses(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=IGNORE, reduction="none")
