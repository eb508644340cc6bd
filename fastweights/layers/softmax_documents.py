"""How documents packed into one row are attended to by softmax, those of like length together, and what of each later tokens may see."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastweights.notation import CuSeqlens

MOST = 32_768
"""Documents of one call of attention: as rows of a batch they are blocks of a launch, of which CUDA allows 65,535."""


class Layout(NamedTuple):
    """Where the tokens of a pack of T tokens stand in groups of documents, and in the state after them."""

    groups: list[tuple[int, int]]
    """Documents of each group, and tokens of its longest."""
    tokens: Tensor
    """Which token of the pack stands where in the groups, one after another; behind a document its last again."""
    back: Tensor
    """Where there each token of the pack is ``[T]``."""
    documents: int
    slots: int
    """Of the state: the most tokens of a document that later ones may see."""
    last: Tensor
    """The tokens of the pack that later ones may see."""
    slot: Tensor
    """Where each of these goes in ``[documents · slots]``."""

    def spread(self, x: Tensor, fill: int) -> Tensor:
        """Of ``x [1, T, …]`` what later tokens may see, ``[documents, slots, …]``; the first slots of a short document hold ``fill``."""
        room = x.new_full((self.documents * self.slots, *x.shape[2:]), fill)
        return room.index_copy_(0, self.slot, x[0].index_select(0, self.last)).unflatten(0, (self.documents, self.slots))


_found = WeakIdKeyDictionary()
"""Layouts of tensors of bounds that are still in use."""


def layout(cu_seqlens: CuSeqlens, most_kept: int | None, device: torch.device) -> Layout:
    """Of documents at these bounds, of each of which later tokens may see the last ``most_kept``, or all.

    The lengths have to be known on the host, which waits for the device; so the layers of a model share what the first has found.
    """
    if cu_seqlens.is_inference():  # does not say when it is overwritten
        return _layout(cu_seqlens.tolist(), most_kept, device)
    version, known = _found.get(cu_seqlens, (None, {}))
    if version != cu_seqlens._version:
        known = {}
        _found[cu_seqlens] = cu_seqlens._version, known
    asked = most_kept, device, torch.cuda.current_stream(device) if device.type == "cuda" else None  # another stream may come too early
    if asked not in known:
        with torch.inference_mode(False):  # a training may use it after that
            known[asked] = _layout(cu_seqlens.tolist(), most_kept, device)
    return known[asked]


def _layout(bounds: list[int], most_kept: int | None, device: torch.device) -> Layout:
    groups, tokens, back = _by_length(bounds)
    end = torch.tensor(bounds[1:], dtype=torch.int64, device="cpu")
    length = torch.tensor(bounds, dtype=torch.int64, device="cpu").diff()
    kept = length if most_kept is None else length.clamp(max=most_kept)
    slots = int(kept.max())
    row = torch.arange(len(kept), device="cpu").repeat_interleave(kept)
    left = kept.cumsum(0)[row] - torch.arange(len(row), device="cpu")  # tokens to the end of the document
    tokens, back, last, slot = (_sent(t, device) for t in (tokens, back, end[row] - left, (row + 1) * slots - left))
    return Layout(groups, tokens, back, len(kept), slots, last, slot)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it is at."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _by_length(bounds: list[int]) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """Documents in groups of like length: the longest less than twice the shortest, from 64 tokens on less than 5/4 of it.

    Returns (documents, tokens of the longest) of each group; which token of the pack stands where in the groups, one after another (behind
    a document its last again); and where there each token of the pack is. All on the CPU.
    """
    classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, end in itertools.pairwise(bounds):
        if (length := end - start) > 0:
            bits = length.bit_length()
            quarter = length >> (bits - 3) if bits > 6 else 0
            classes.setdefault((bits, quarter), []).append((start, length))
    groups, tokens, back, before = list[tuple[int, int]](), list[Tensor](), torch.empty(bounds[-1], dtype=torch.int64, device="cpu"), 0
    for members in (one[i : i + MOST] for one in classes.values() for i in range(0, len(one), MOST)):
        start, length = torch.tensor(members, device="cpu").T.unsqueeze(2)
        groups.append((len(members), int(length.max())))
        step = torch.arange(groups[-1][1], device="cpu")
        token, inside = start + torch.minimum(step, length - 1), step < length
        back[token[inside]] = before + torch.arange(token.numel(), device="cpu").view_as(token)[inside]
        tokens.append(token.flatten())
        before += token.numel()
    return groups, torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *tokens]), back
