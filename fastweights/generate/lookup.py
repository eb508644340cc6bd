"""Prompt lookup: guess the next tokens from what followed the last few of them earlier in the text, and check them in one pass.

Source: Saxena, Prompt Lookup Decoding (2023). A memory does not keep what it overwrites, so going back to the last right token is going
back to the state before the guess, which is still there, and reading the right tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastweights.generate.passes import Passes
from fastweights.models.cache import LayerState

GRAMS = (4, 3, 2)
"""How many of the last tokens must have stood there before; the longest match is taken, and of those the latest."""


class Lookup:
    """Where each run of tokens was last followed by another token. Grows with the text, a few entries a token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)  # first, so that an interrupt leaves no run that nothing follows
            here = len(self._tokens) - 1
            for n in GRAMS:
                if here >= n:
                    self._next[tuple(self._tokens[here - n : here])] = here

    def guess(self, count: int) -> list[int]:
        """``count`` tokens that may come next, or none. Where what followed reaches the end of the text, it goes round."""
        for n in GRAMS:
            begin = self._next.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if begin is not None:
                period = len(self._tokens) - begin
                return [self._tokens[begin + i % period] for i in range(count)]
        return []


@dataclass(frozen=True, eq=False)
class Checked:
    """What the model says about a guess."""

    passes: Passes
    inputs: list[int]
    before: Sequence[LayerState]
    after: list[LayerState]
    """After all ``inputs``."""
    tokens: list[int]
    """The likeliest tokens: the guess as far as it is right, and one more."""

    def states(self, used: int) -> list[LayerState]:
        """The states before the last of the first ``used`` tokens is read."""
        return self.after if used == len(self.inputs) else self.passes.read(self.inputs[:used], self.before)[1]


@torch.inference_mode()
def check_guess(passes: Passes, states: Sequence[LayerState], token: int, guess: list[int]) -> Checked | None:
    """Read ``token`` and then ``guess`` after ``states`` in one pass. None if the logits are not finite, for the next step to find."""
    inputs = [token, *guess]
    hidden, after = passes.read(inputs, states)
    model = passes.model
    logits = model.lm_head(model.model.norm(hidden))[0]
    if not logits.isfinite().all():
        return None
    likeliest = logits.argmax(-1).tolist()
    right = next((i for i, guessed in enumerate(guess) if guessed != likeliest[i]), len(guess))
    return Checked(passes, inputs, states, after, likeliest[: right + 1])
