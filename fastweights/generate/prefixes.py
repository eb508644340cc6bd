"""States of texts that were read before, found again by the longest beginning they share with a new one."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastweights.generate.prompts import Tokens
from fastweights.models.cache import LayerState


class Prefix(NamedTuple):
    states: Sequence[LayerState]
    read: int
    """Tokens that the states hold."""


class Prefixes:
    """At most ``capacity`` states; the one not used for longest goes first. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tokens: Sequence[int] | Tokens, states: Sequence[LayerState]) -> None:
        """``states`` after ``tokens``; they are kept as they are, and must not be written into."""
        if not self.capacity or not len(tokens):
            return
        (key,) = _digests(tokens, [len(tokens)])
        with self._lock:
            if key not in self._kept:
                self._lengths[len(tokens)] += 1
            self._kept[key] = Prefix(states, len(tokens))
            self._kept.move_to_end(key)
            while len(self._kept) > self.capacity:
                _, old = self._kept.popitem(last=False)
                self._lengths -= Counter([old.read])

    def longest(self, tokens: Sequence[int] | Tokens) -> Prefix | None:
        """The longest text kept with which ``tokens`` begin and after which they go on."""
        with self._lock:
            lengths = sorted(length for length in self._lengths if length < len(tokens))
            for key in reversed(_digests(tokens, lengths)):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        return None


def _digests(tokens: Sequence[int] | Tokens, lengths: Sequence[int]) -> list[bytes]:
    """A hash of the first n tokens, for each n of ``lengths``, which rise; one pass over the tokens."""
    content = np.asarray(tokens[: lengths[-1]] if lengths else (), np.int64)
    running, begin, digests = hashlib.sha256(), 0, []
    for end in lengths:
        running.update(content[begin:end].tobytes())
        digests.append(running.digest())
        begin = end
    return digests
