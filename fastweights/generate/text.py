"""From tokens to text while they come: characters made of several tokens, and stop strings that lie across tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""
LONGEST_CHARACTER = 4
"""Bytes, and so tokens, of one character in UTF-8."""
WINDOW = 16
"""Tokens decoded at a time before all but the last few are let go."""


class TextStream:
    """The text of an answer, in pieces that no later token changes. All pieces together are the text.

    ``context`` is the end of what stands before the answer: it decides about the space in front of the first word.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        """Was a stop string met? What follows it is dropped."""
        self._ids = list(context[-LONGEST_CHARACTER:])
        before = self._decode(self._ids)
        if before.endswith(UNFINISHED):
            self._ids, before = [], ""
        self._out = len(before)
        """How many characters of the window's text have gone on to `_held`."""
        self._waited = 0
        """For how many tokens the window's text has ended in an unfinished character."""
        self._held = ""
        """Text that may turn out to be the beginning of a stop string."""

    def push(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self.stopped:
                return
            ids = [*self._ids, token]
            text = self._decode(ids)
            self._ids = ids  # only now, so that an interrupt does not leave a token that comes again
            if not text.endswith(UNFINISHED):
                self._waited = 0
                self._hold(text, len(text))
                self._slide(text)
            elif self._waited < LONGEST_CHARACTER - 1:
                self._waited += 1
            else:  # no character is that long: these bytes are none, except perhaps the last three
                self._hold(text, len(text) - (LONGEST_CHARACTER - 1))
                self._slide(text)

    def pop(self, final: bool = False) -> str:
        """The text that has become certain since the last call; with ``final`` all that there is."""
        if final and not self.stopped:
            text = self._decode(self._ids)
            self._hold(text, len(text))
        keep = 0 if final or self.stopped else max((_overlap(self._held, stop) for stop in self.stop), default=0)
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece

    def _hold(self, text: str, end: int) -> None:
        if end <= self._out:
            return
        self._held += text[self._out : end]
        self._out = end
        found = [at for at in map(self._held.find, self.stop) if at >= 0]
        if found:
            self._held, self.stopped = self._held[: min(found)], True

    def _slide(self, text: str) -> None:
        """Forget tokens that are done, unless the last few alone would read differently."""
        if len(self._ids) <= WINDOW:
            return
        tail = self._ids[-LONGEST_CHARACTER:]
        short = self._decode(tail)
        out = self._out - (len(text) - len(short))
        if text.endswith(short) and out >= 0:
            self._ids, self._out = tail, out

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
