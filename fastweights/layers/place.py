"""Where each token stands in its document."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.notation import CuSeqlens, Hidden


def positions(x: Hidden, place: Int[Tensor, " R"] | None, cu_seqlens: CuSeqlens | None) -> tuple[Int[Tensor, "B T"], Int[Tensor, " R"]]:
    """Each token's 0-based place in its document ``[B, T]``, and how many tokens each row has read after them ``[R]``; both int64.

    ``place [R]`` is how many each row had read before; None means none.
    """
    B, T = x.shape[:2]
    token = torch.arange(T, device=x.device)
    if cu_seqlens is None:
        place = token.new_zeros(B) if place is None else place
        return place.unsqueeze(1) + token, place + T
    bounds = cu_seqlens.to(torch.int64)
    place = token.new_zeros(len(bounds) - 1) if place is None else place
    row = torch.searchsorted(bounds[1:], token, right=True)
    return (token - bounds[row] + place[row]).unsqueeze(0), place + bounds.diff()
