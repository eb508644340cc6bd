"""A request as its owner sees it, and what it comes to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from fastweights.generate.lookup import Lookup
from fastweights.generate.prompts import Tokens, joined, prompt_tokens
from fastweights.generate.reading import Reading
from fastweights.generate.sampling import Sampling
from fastweights.generate.snapshot import Snapshot, describe, seen_tokens
from fastweights.generate.text import LONGEST_CHARACTER, TextStream
from fastweights.models.cache import LayerState

if TYPE_CHECKING:
    from fastweights.generate.engine import Engine

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """An answer, whole or as far as it came."""

    text: str
    """Without special tokens, and without the stop string; empty if the engine has no tokenizer."""
    tokens: tuple[int, ...]
    """All tokens of the answer, with the end-of-text token or those that made up the stop string."""
    finish_reason: FinishReason
    """``eos``: the model ended it. ``stop``: a stop string. ``length``: max_new_tokens. ``cancelled``. ``error``: see ``error``."""
    error: Exception | None
    """What went wrong in the model while it worked on this request, if anything did."""
    prompt_tokens: int
    """Tokens before the answer, those of a snapshot included."""
    reused_tokens: int
    """How many of them were not read again, thanks to a snapshot or to an earlier request."""
    drafted: int
    """Tokens that speculation guessed."""
    accepted: int
    """How many of those were right."""
    snapshot: Snapshot | None
    """The memory after the answer, if it was asked for with ``keep=True``."""


class Request:
    """What `Engine.submit` returns. Iterate over it for text as it comes, or ask for the `result`; either may be done in any thread.

    There is no thread behind it: whoever waits does the engine's work, for all requests alike.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Tokens,
        sampling: Sampling,
        after: Snapshot | None,
        keep: bool,
    ) -> None:
        self._engine, self.sampling, self.keep = engine, sampling, keep
        drawn = sampling.seed is None and sampling.temperature > 0
        self.seed = int(torch.randint(2**63 - 1, ())) if drawn else sampling.seed or 0
        self.prompt, self.after = prompt, after
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.ending: FinishReason | None = None
        """What the reason will be, once the last token has come."""
        self.cancelled = False
        self.reading: Reading | None = None
        """While the prompt is being read."""
        self.reused = 0
        self.drafted, self.accepted = 0, 0
        self.snapshot: Snapshot | None = None
        self._before = len(self.text_before)
        self.lookup = Lookup() if sampling.speculate else None
        if self.lookup is not None:
            self.lookup.extend(self.text_before.tolist())
        self._text: TextStream | None = None
        if engine.tokenizer is not None:
            self._text = TextStream(engine.tokenizer, sampling.stop, self.text_before[-LONGEST_CHARACTER:].tolist())
        self._popped = 0
        """How many tokens there were when text was last taken from `_text`."""

    @property
    def text_before(self) -> Tokens:
        """The tokens before the answer that are at hand: the prompt, and the last few of the snapshot's."""
        return self.prompt if self.after is None else joined(self.after.pending, self.prompt)

    @property
    def text(self) -> Tokens:
        """They, and the answer's so far."""
        return joined(self.text_before, self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return (0 if self.after is None else len(self.after)) + len(self.prompt)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def result(self) -> Completion:
        """Wait for the whole answer. A failure of the model is not raised here: it is the completion's ``error``."""
        self._engine.work_until(lambda: self.done)
        with self._engine.turn:
            self._pop()
            assert self.finish_reason is not None
            return Completion(
                text="" if self._text is None else "".join(self._text.said),
                tokens=tuple(self.tokens),
                finish_reason=self.finish_reason,
                error=self.error,
                prompt_tokens=self.prompt_tokens,
                reused_tokens=self.reused,
                drafted=self.drafted,
                accepted=self.accepted,
                snapshot=self.snapshot,
            )

    def cancel(self) -> None:
        """End the request before the engine's next step; what has come stays. Nothing happens if it is done."""
        self.cancelled = True

    def __iter__(self) -> Iterator[str]:
        """The text in pieces, as it comes. Leaving the loop cancels the request; a failure of the model is raised as RuntimeError."""
        try:
            while (piece := self._next_piece()) is not None:
                if piece:
                    yield piece
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        """The same for asyncio: the waiting is done in asyncio's threads."""
        try:
            while (piece := await asyncio.to_thread(self._next_piece)) is not None:
                if piece:
                    yield piece
        finally:
            self.cancel()

    def add(self, token: int, eos: frozenset[int]) -> bool:
        """The engine's: one token more. Is it the last?"""
        self.tokens.append(token)
        return self.settle(eos)

    def settle(self, eos: frozenset[int]) -> bool:
        """The engine's: see to the tokens that have come, also where an interrupt came first. Is the last one the answer's last?"""
        if not self.tokens:
            return False
        if self.lookup is not None:
            self.lookup.extend(self.tokens[len(self.lookup) - self._before :])
        if self.sampling.stop:
            self._push()
        if self.tokens[-1] in eos and not self.sampling.ignore_eos:
            self.ending = "eos"
        elif self._text is not None and self._text.stopped:
            self.ending = "stop"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.ending = "length"
        else:
            return False
        return True

    @property
    def may_run_ahead(self) -> bool:
        """The engine's: may its row have taken more tokens than have been read? Not if anybody wants its state."""
        return not self.keep and self.lookup is None

    def remember(self, states: Sequence[LayerState]) -> None:
        """The engine's: keep what was asked for of ``states``, those before the last token is read."""
        engine, tokens = self._engine, self.text
        if self.after is None:
            engine.prefixes.put(tokens[:-1], states)
        if self.keep:
            read, seen = self.prompt_tokens + len(self.tokens) - 1, seen_tokens(engine.model, tokens, self.after)
            self.snapshot = Snapshot(tuple(states), read, (int(tokens[-1]),), seen, engine.fingerprint, describe(engine.model))

    def finish(self, reason: FinishReason | None = None, error: Exception | None = None) -> None:
        """The engine's: nothing more comes. The reason is by default the one that `add` found."""
        self.reading, self.error = None, error
        self.finish_reason = reason or self.ending

    def _next_piece(self) -> str | None:
        """New text, maybe empty; None at the end."""
        if self._text is None:
            raise ValueError("text in pieces needs a tokenizer, and this engine has none; ask for the result")
        self._engine.work_until(lambda: self.done or len(self.tokens) > self._popped)
        with self._engine.turn:
            ended = self.done
            piece = self._pop()
        if ended and not piece:
            if self.error is not None:
                raise RuntimeError(f"the model failed on this request: {self.error}") from self.error
            return None
        return piece

    def _push(self) -> None:
        if self._text is not None:
            self._text.push(self.tokens[self._text.pushed :])

    def _pop(self) -> str:
        self._push()
        self._popped = len(self.tokens)
        return "" if self._text is None else self._text.pop(final=self.done)


def ask(engine: Engine, prompt: str | Sequence[int], sampling: Sampling, after: Snapshot | None, keep: bool) -> Request:
    """ValueError for what the engine cannot take."""
    if sampling.stop and engine.tokenizer is None:
        raise ValueError(f"stop={sampling.stop} needs text, and this engine has no tokenizer")
    tokens = prompt_tokens(prompt, engine.tokenizer, begins=after is None)
    engine.check(tokens, sampling.max_new_tokens, after)
    return Request(engine, tokens, sampling, after, keep)
