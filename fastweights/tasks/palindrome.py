"""Say a random sequence backwards: ``source SEP reversed source``, as in the Kaczmarz Linear Attention paper (arXiv 2605.08587)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastweights.tasks.base import IGNORE, Batch, Task, doubling, finish, require
from fastweights.tasks.draw import integers


@dataclass(frozen=True, kw_only=True)
class Palindrome(Task):
    """Every token after SEP is asked, with the right ones before it in view. Stratum ``gap``: tokens back to the symbol's first place,
    up to the next power of two."""

    name: ClassVar[str] = "palindrome"

    length: int = 1024
    """Tokens a sequence, at most: the source has (length − 1) // 2 symbols, so an even length gives one token fewer."""
    symbols: int = 127
    """Different symbols; SEP is one more token."""

    def __post_init__(self) -> None:
        require(self.length >= 3, f"length is {self.length}; a palindrome needs at least 3 tokens")
        require(self.symbols >= 2, f"symbols is {self.symbols}; at least 2 are needed")

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        n = (self.length - 1) // 2
        source = integers(rng, self.symbols, size, n)
        tokens = np.concatenate([source, np.full((size, 1), self.symbols, dtype=np.int64), source[:, ::-1]], axis=1)
        labels = tokens.copy()
        labels[:, : n + 1] = IGNORE
        place = np.arange(2 * n + 1)
        gap = np.where(place > n, doubling(np.maximum(2 * (place - n), 1)), 0)  # the token at n + i mirrors the one at n − i
        return finish(tokens, labels, gap=np.tile(gap, (size, 1)))
