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
        self.pushed = 0
        """How many tokens have come."""
        self.said: list[str] = []
        """All pieces."""

    def push(self, tokens: Iterable[int]) -> None:
        """More tokens. An interrupt leaves each either in or out, so that the call may be made again from ``pushed`` on."""
        for token in tokens:
            ids, out, held, stopped, waited = self._ids, self._out, self._held, self.stopped, self._waited
            if not stopped:
                ids = [*ids, token]
                text = self._decode(ids)
                unfinished = text.endswith(UNFINISHED)
                if unfinished and waited < LONGEST_CHARACTER - 1:
                    waited += 1
                else:  # no character is longer: bytes that are none yet are none, except perhaps the last three
                    waited = waited if unfinished else 0
                    out, held, stopped = self._hold(text, len(text) - (LONGEST_CHARACTER - 1 if unfinished else 0))
                    ids, out = self._slide(ids, text, out)
            # Behind each other and without a call, where Python hears of no interrupt.
            self._ids, self._out, self._held, self.stopped, self._waited, self.pushed = ids, out, held, stopped, waited, self.pushed + 1

    def pop(self, final: bool = False) -> str:
        """The text that has become certain since the last call; with ``final`` all that there is."""
        out, held, stopped = self._out, self._held, self.stopped
        if final and not stopped:
            text = self._decode(self._ids)
            out, held, stopped = self._hold(text, len(text))
        keep = 0 if final or stopped else max((_overlap(held, stop) for stop in self.stop), default=0)
        piece, held = held[: len(held) - keep], held[len(held) - keep :]
        self.said += [piece]  # no call here either
        self._out, self._held, self.stopped = out, held, stopped
        return piece

    def _hold(self, text: str, end: int) -> tuple[int, str, bool]:
        """What `_out`, `_held` and `stopped` become when the window's text is certain up to ``end``."""
        if end <= self._out:
            return self._out, self._held, self.stopped
        held = self._held + text[self._out : end]
        found = [at for at in map(held.find, self.stop) if at >= 0]
        return end, held[: min(found)] if found else held, bool(found)

    def _slide(self, ids: list[int], text: str, out: int) -> tuple[list[int], int]:
        """`_ids` and `_out` without the tokens that are done, unless the last few alone would read differently."""
        if len(ids) > WINDOW:
            short = self._decode(ids[-LONGEST_CHARACTER:])
            shorter = out - (len(text) - len(short))
            if text.endswith(short) and shorter >= 0:
                return ids[-LONGEST_CHARACTER:], shorter
        return ids, out

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
