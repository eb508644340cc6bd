"""Where each token stands in its document, and the checks that all mixers share."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from fastweights.notation import CuSeqlens, Hidden
from fastweights.ops.checks import check_cu_seqlens


def check_hidden(x: Tensor, hidden_size: int) -> None:
    if x.dim() != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must be [B, T, D] with D = {hidden_size}; got {list(x.shape)}")


def positions(x: Hidden, place: Int[Tensor, " R"] | None, cu_seqlens: CuSeqlens | None) -> tuple[Int[Tensor, "B T"], Int[Tensor, " R"]]:
    """Each token's 0-based place in its document ``[B, T]``, and how many tokens each row has read after them ``[R]``; both int64.

    ``place [R]`` is how many each row had read before; None means none.
    """
    B, T = x.shape[:2]
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, B, T)
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    token = torch.arange(T, device=x.device)
    if place is None:
        place = token.new_zeros(rows)
    elif len(place) != rows:
        raise ValueError(f"the state has {len(place)} rows and x has {rows} {'sequences' if cu_seqlens is None else 'documents'}")
    if cu_seqlens is None:
        return place.unsqueeze(1) + token, place + T
    bounds = cu_seqlens.to(torch.int64)
    row = torch.searchsorted(bounds, token, right=True) - 1  # not in bounds[1:]: torch 2.11 cannot compile a search in a slice for a GPU
    return (token - bounds[row] + place[row]).unsqueeze(0), place + bounds.diff()
