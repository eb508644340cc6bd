"""Padded batches and packed documents. The layers know only the second: the model packs once on the way in and pads once on the way out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fastweights.notation import CuSeqlens


class Packing(NamedTuple):
    """How the real tokens of a padded batch lie in one packed row."""

    token: Int[Tensor, "real"]  # noqa: F821, UP037, a name of an axis
    """Where each real token is in the flattened ``[B · T]`` batch."""
    last: Int[Tensor, "B T"]
    """The last real token of its row at or before each position, as a place in the packed row; −1 if there is none yet."""
    cu_seqlens: CuSeqlens
    """``[B + 1]``; a row of padding alone is an empty document."""

    @classmethod
    def of(cls, real: Bool[Tensor, "B T"]) -> Packing:
        cu_seqlens = F.pad(real.sum(1).cumsum(0), (1, 0))
        seen = real.cumsum(1)
        last = torch.where(seen > 0, cu_seqlens[:-1, None] + seen - 1, -1)
        return cls(real.flatten().nonzero().squeeze(1), last, cu_seqlens)

    def pack(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "1 real D"]:
        """``[B, T, D] -> [1, real, D]``."""
        return x.flatten(0, 1)[self.token].unsqueeze(0)

    def unpack(self, x: Float[Tensor, "1 real D"]) -> Float[Tensor, "B T D"]:
        """``[1, real, D] -> [B, T, D]``.

        A padded position repeats the last real token of its row, for nothing was read there and nothing has changed; before the first real
        token it is 0. So the last column always holds what a row has come to, and right-padded prompts go on as left-padded ones do.
        """
        padded = F.pad(x.squeeze(0), (0, 0, 0, 1))  # a row of zeros at the end, which is where index −1 leads
        return padded[self.last]


def real_tokens(attention_mask: Tensor, B: int, T: int, seen: int) -> Bool[Tensor, "B T"]:
    """The mask of the T tokens at hand; a mask that also covers the ``seen`` earlier ones, as ``generate`` passes, is cut to them."""
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        got = f"{list(attention_mask.shape)} of {attention_mask.dtype}"
        raise ValueError(f"attention_mask must be [B, T] of integers or booleans, 1 for real tokens; got {got}")
    if attention_mask.shape[0] != B or attention_mask.shape[1] not in (T, seen + T):
        allowed = f"{[B, T]} or {[B, seen + T]}" if seen else f"{[B, T]}"
        raise ValueError(f"attention_mask is {list(attention_mask.shape)} for input of {[B, T]} after {seen} tokens; allowed: {allowed}")
    return attention_mask[:, attention_mask.shape[1] - T :].bool()
