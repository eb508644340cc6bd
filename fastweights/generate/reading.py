"""Reading a text in pieces: after each, the state is all that is left of it, so memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fastweights.generate.prefixes import Prefixes
from fastweights.generate.snapshot import Snapshot
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.cache import LayerState, map_state


class Reading:
    """A text on its way into a state.

    Pieces end where the number of tokens read is a multiple of ``chunk``, whatever the text began from; only the last piece of all may end
    elsewhere. States are replaced and never written into, so that a beginning may be shared and kept.
    """

    def __init__(
        self, model: FastWeightsForCausalLM, chunk: int, tokens: Sequence[int], states: Sequence[LayerState] | None = None, read: int = 0
    ) -> None:
        self.model, self.chunk = model, chunk
        self.tokens = tokens
        """What was not yet read of them begins at `_at`."""
        self.states = list(states) if states is not None else [block.mixer.initial_state(1) for block in model.model.layers]
        self.read = read
        """Tokens that the states hold."""
        self._at = 0

    @property
    def left(self) -> Sequence[int]:
        """Tokens not yet read; at the end one, which is the first to be decoded."""
        return self.tokens[self._at :]

    @property
    def remaining(self) -> int:
        """How many those are."""
        return len(self.tokens) - self._at

    @property
    def piece(self) -> int:
        """How long the next piece is: to the end of its chunk, or to the last token but one."""
        return min(self.chunk - self.read % self.chunk, self.remaining - 1)

    @property
    def at_chunks_end(self) -> bool:
        """Does the next piece reach the end of its chunk?"""
        return self.piece == self.chunk - self.read % self.chunk

    def go_on(self) -> int:
        """Read the next piece; returns its length, 0 at the end."""
        if not (length := self.piece):
            return 0
        _, self.states = read_tokens(self.model, self.tokens[self._at : self._at + length], self.states)
        self.read += length
        self._at += length
        return length


def begin(model: FastWeightsForCausalLM, chunk: int, tokens: list[int], after: Snapshot | None, prefixes: Prefixes) -> Reading:
    """The reading of ``tokens``, a snapshot's pending ones included, from what is known of them."""
    if after is not None:
        return Reading(model, chunk, tokens, [map_state(lambda x: x.to(model.device), state) for state in after.states], after.read)
    known = prefixes.longest(tokens)
    if known is None:
        return Reading(model, chunk, tokens)
    return Reading(model, chunk, tokens[known.read :], known.states, known.read)


@torch.inference_mode()
def read_tokens(
    model: FastWeightsForCausalLM, tokens: Sequence[int], states: Sequence[LayerState]
) -> tuple[Float[Tensor, "1 T D"], list[LayerState]]:
    """What the last layer makes of ``tokens``, before the last norm, and the states after them. ``states`` stay as they are."""
    x = model.model.embed_tokens(torch.tensor([tokens], device=model.device))
    after = []
    for block, state in zip(model.model.layers, states, strict=True):
        x, state = block(x, state=state)
        after.append(state)
    return x, after
