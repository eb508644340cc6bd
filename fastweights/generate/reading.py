"""Reading a text in pieces: after each, the state is all that is left of it, so memory does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastweights.generate.passes import Passes
from fastweights.generate.prefixes import Prefixes
from fastweights.generate.prompts import Tokens
from fastweights.generate.snapshot import Snapshot
from fastweights.models.cache import LayerState, map_state


def default_chunk(device: torch.device) -> int:
    """Tokens of a piece: on a GPU so many that its work outlasts the host's launching of the next."""
    return 16_384 if device.type == "cuda" else 512


class Reading:
    """A text on its way into a state.

    Pieces end where the number of tokens read is a multiple of ``chunk``, whatever the text began from; only the last piece of all may end
    elsewhere. States are replaced and never written into, so that a beginning may be shared and kept.
    """

    def __init__(self, passes: Passes, chunk: int, tokens: Tokens, states: Sequence[LayerState] | None = None, read: int = 0) -> None:
        self.passes, self.chunk = passes, chunk
        self.tokens = tokens
        """What was not yet read of them begins at `_at`."""
        self.states = passes.initial_states() if states is None else list(states)
        self.read = read
        """Tokens that the states hold."""
        self._at = 0

    @property
    def left(self) -> Tokens:
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
        _, self.states = self.passes.read(self.tokens[self._at : self._at + length], self.states)
        self.read += length
        self._at += length
        return length


def begin(passes: Passes, chunk: int, tokens: Tokens, after: Snapshot | None, prefixes: Prefixes) -> Reading:
    """The reading of ``tokens``, a snapshot's pending ones included, from what is known of them."""
    if after is not None:
        return Reading(passes, chunk, tokens, [map_state(lambda x: x.to(passes.model.device), state) for state in after.states], after.read)
    known = prefixes.longest(tokens)
    if known is None:
        return Reading(passes, chunk, tokens)
    return Reading(passes, chunk, tokens[known.read :], known.states, known.read)
