"""What a model carries from one call to the next, as a transformers ``Cache``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fastweights.layers import SoftmaxState
from fastweights.models.config import FastWeightsConfig
from fastweights.notation import MemoryState

LayerState = MemoryState | SoftmaxState


class FastWeightsCache(Cache):
    """The state of every layer: memories, convolutions, places and CCQ's moments, or a softmax layer's keys and values.

    One row a sequence or, after packed input, a document. The size does not grow with the text, except in softmax layers. Each call of the
    model replaces the states and never writes into their tensors. A memory does not keep what it overwrites, so `crop` cannot take tokens
    back: take a `copy` before tokens that may have to go.
    """

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(layers=[])
        self.states: list[LayerState | None] = [None] * config.num_hidden_layers
        """One a layer; None before the first token."""
        self.seen_tokens = 0
        """Tokens a row has been given, padding included."""

    @property
    def batch_size(self) -> int:
        """Rows of state; −1 before the first token."""
        return -1 if self.states[0] is None else len(self.states[0].place)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: there is no limit."""
        return -1

    def copy(self) -> FastWeightsCache:
        """A snapshot that later calls leave alone: decode from it any number of times, or put it back in the place of a rollback."""
        twin = object.__new__(FastWeightsCache)
        twin.__dict__.update(self.__dict__)
        twin.states = [map_state(torch.clone, state) for state in self.states]
        return twin

    def reset(self) -> None:
        self.states = [None] * len(self.states)
        self.seen_tokens = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (numbers or a mask)."""
        self._map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, one after the other."""
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do where nothing is to go; else a ValueError.

        Since transformers 5.18 only ``-n``, "take the last n tokens back", is a crop; before, a positive number was the length to keep.
        """
        if tokens_to_remove == 0 or self.seen_tokens == 0 or tokens_to_remove >= self.seen_tokens:
            return
        raise ValueError(
            f"crop({tokens_to_remove}) would take back some of the {self.seen_tokens} tokens seen, and a fast-weight memory does not keep "
            "what it overwrote; take cache.copy() before tokens that may be rejected, and go on from the copy"
        )

    def activate_past_recording(self) -> None:
        """Asked for by decoding methods that will crop: a ValueError before they begin."""
        raise ValueError("a fast-weight memory keeps no past to crop back to; take cache.copy() before tokens that may be rejected")

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """All False: to transformers a linear layer is one that cannot say how many tokens it has seen, and ours can."""
        return [False] * len(self.states)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"FastWeightsCache(layers={len(self)}, rows={self.batch_size}, seen_tokens={self.seen_tokens})"

    def _map_rows(self, f: Callable[[Tensor], Tensor]) -> None:
        self.states = [map_state(f, state) for state in self.states]


def map_state(f: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """``f`` of every tensor in nested named tuples, and of those in the same places of ``others``; None stays None."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return f(state, *others)
    return type(state)(*(map_state(f, *parts) for parts in zip(state, *others, strict=True)))
