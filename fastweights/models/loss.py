"""Next-token loss, without ever holding the logits of a whole sequence unless the caller wants them.

Why not `torch.nn.functional.linear_cross_entropy`: it is new in torch 2.13, and 2.11 is allowed here, so it would be a second way and not
another. And with bfloat16 operands, in 2.13, it also returns the loss in bfloat16: a sum over 8,192 tokens came out 2.5 % off. It casts
nothing under autocast, and breaks the graph under torch.compile. Once 2.13 is the oldest and the loss is float32, it should replace
`summed_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fastweights.layers.linear import plain
from fastweights.notation import CuSeqlens, Hidden
from fastweights.precision import at_least_float32, outside_autocast

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
    targets = F.pad(labels.long(), (0, 1), value=IGNORE)[:, 1:]  # of no tokens none
    if cu_seqlens is not None and labels.shape[1]:
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

    def of_piece(x: Tensor, target: Tensor) -> Tensor:
        return losses(head(x), target)

    grad = torch.is_grad_enabled()
    found = [checkpoint(of_piece, *piece, use_reentrant=False) if grad else of_piece(*piece) for piece in _pieces(hidden, targets)]
    return torch.cat(found).view(targets.shape)


def summed_losses(
    hidden: Hidden,
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, "B T"],
    losses: Callable[[Tensor, Tensor], Tensor] = losses_of_logits,
    with_gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Float[Tensor, ""]:
    """The sum of `token_losses`. Where both gradients are wanted and ``head`` is a plain `torch.nn.Linear`, they are made with the loss, so
    that the logits are made once: `loss_and_gradients` (or ``with_gradients``, that compiled) of each chunk."""
    if torch.is_grad_enabled() and isinstance(head, nn.Linear) and plain(head) and hidden.requires_grad and head.weight.requires_grad:
        return _Summed.apply(hidden, head.weight, targets, with_gradients or loss_and_gradients)
    return token_losses(hidden, head, targets, losses).sum()


def loss_and_gradients(
    x: Float[Tensor, "n D"], weight: Float[Tensor, "V D"], targets: Int[Tensor, " n"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "n D"], Float[Tensor, "V D"]]:
    """The summed loss of logits ``x weightᵀ``, and its gradients by x and weight. The softmax is in float32 (float64 for float64)."""
    logits = F.linear(x, weight)
    wide, asked = at_least_float32(logits), targets != IGNORE
    place = targets.where(asked, 0)
    norm = wide.logsumexp(-1)
    loss = (norm - wide.gather(-1, place.unsqueeze(-1)).squeeze(-1)).where(asked, 0).sum()
    right = torch.arange(weight.shape[0], device=x.device) == place.unsqueeze(-1)
    error = ((wide - norm.unsqueeze(-1)).exp() - right.to(wide.dtype)).where(asked.unsqueeze(-1), 0).to(logits.dtype)
    return loss, error @ weight, error.t() @ x


class _Summed(torch.autograd.Function):
    """All chunks of `loss_and_gradients`; what the weight gets is added up in float32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, with_gradients):
        kind, dtype = hidden.device.type, torch.promote_types(hidden.dtype, weight.dtype)
        if kind != "meta" and torch.is_autocast_enabled(kind) and dtype != torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(kind)
        with outside_autocast(hidden):
            narrow = weight.to(dtype)
            total, dweight, dx = 0.0, torch.zeros_like(at_least_float32(weight)), []
            for x, target in _pieces(hidden, targets):
                loss, dpiece, dw = with_gradients(x.to(dtype), narrow, target)
                total = total + loss
                dweight += dw
                dx.append(dpiece)
            ctx.save_for_backward(torch.cat(dx).view(hidden.shape), dweight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        dx, dweight = ctx.saved_tensors
        return at_least_float32(dx) * upstream, dweight * upstream, None, None  # in bfloat16 1/items could be 0.4 % off


def _pieces(hidden: Hidden, targets: Int[Tensor, "B T"]) -> Iterator[tuple[Tensor, Tensor]]:
    chunk = GPU_CHUNK if hidden.is_cuda else CHUNK
    return zip(hidden.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True)
