"""Multi-query associative recall: pairs first, then each key once more among filler; say its value.

`MQAR` is the field's definition (Arora et al., Zoology, arXiv 2312.04927). `MQARKLA` is the variant of the Kaczmarz Linear Attention paper
(arXiv 2605.08587); with ``pairs=1`` it is what that paper calls S-NIAH. docs/tasks.md lists how they differ and what that costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastweights.tasks.base import IGNORE, Batch, Task, at_places, doubling, finish, require
from fastweights.tasks.draw import distinct, integers, weighted_distinct


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """The standard task. Keys ``1 … V/2 − 1`` and values ``V/2 … V − 1`` are drawn without replacement; the queries sit in even,
    non-overlapping slots after the pairs, filler is any token. Stratum ``gap``: tokens from the pair's value to its query, up to the
    next power of two."""

    name: ClassVar[str] = "mqar"

    length: int = 64
    """Tokens a sequence; even, at least 4 × ``pairs``."""
    pairs: int = 4
    """Key-value pairs, each queried once."""
    vocab_size: int = 8192
    """Tokens; the lower half are keys (and 0, which is only filler), the upper half values."""
    power: float = 0.01
    """The slot of a query is drawn with probability ∝ slot^(power − 1), the first pair first: 0.01 puts most queries soon after the
    pairs, 1 is uniform."""

    def __post_init__(self) -> None:
        require(self.pairs >= 1, f"pairs is {self.pairs}; MQAR needs at least 1")
        require(self.length % 2 == 0, f"length is {self.length}; MQAR needs an even length")
        require(
            4 * self.pairs <= self.length,
            f"pairs is {self.pairs} and length {self.length}; MQAR needs 4·pairs ≤ length: two tokens a pair, two a query",
        )
        require(
            self.pairs <= self.vocab_size // 2 - 1,
            f"pairs is {self.pairs} and vocab_size {self.vocab_size}; keys are drawn without replacement from vocab_size/2 − 1 tokens",
        )
        require(self.power > 0, f"power is {self.power}; it must be positive")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        half, start = self.vocab_size // 2, 2 * self.pairs
        slots = (self.length - start) // 2
        keys = 1 + distinct(rng, half - 1, self.pairs, size)
        values = half + distinct(rng, self.vocab_size - half, self.pairs, size)
        weights = np.arange(1, slots + 1, dtype=np.float64) ** (self.power - 1)
        places = start + 2 * weighted_distinct(rng, weights, self.pairs, size)
        filler = integers(rng, self.vocab_size, size, self.length)
        return _recall(filler, keys, values, places)


@dataclass(frozen=True, kw_only=True)
class MQARKLA(Task):
    """The KLA paper's variant. Keys (lower half) and values (upper half) are drawn *with* replacement, each pair's key is asked at its
    own uniformly random later place, and filler is any token, keys included. Strata: ``gap`` as in `MQAR`; ``seen``, 1 where the key
    also stood in the filler before its query; ``repeated``, 1 where two or more pairs have this key."""

    name: ClassVar[str] = "mqar_kla"

    length: int = 256
    """Tokens a sequence; at least 3 × ``pairs`` + 1."""
    pairs: int = 32
    """Key-value pairs, each queried once. 1 is the paper's "S-NIAH", trained there at length 1,024."""
    vocab_size: int = 8192
    """Tokens; the lower half are keys, the upper half values."""

    def __post_init__(self) -> None:
        require(self.pairs >= 1, f"pairs is {self.pairs}; at least 1 is needed")
        require(self.vocab_size >= 2, f"vocab_size is {self.vocab_size}; keys and values need at least 2")
        require(
            3 * self.pairs + 1 <= self.length,
            f"pairs is {self.pairs} and length {self.length}; 3·pairs + 1 ≤ length is needed: two tokens a pair, one a query, one to end",
        )

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    @property
    def ceiling(self) -> float:
        """A key that m pairs share is asked m times and only one of its values can be said, so this is the expected number of different
        keys per pair: n/D · (1 − (1 − 1/n)^D) with n keys and D pairs. Pairs that share key *and* value add less than D / (2·n·values)."""
        n = self.vocab_size // 2
        return n / self.pairs * (1 - (1 - 1 / n) ** self.pairs)

    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        half, start = self.vocab_size // 2, 2 * self.pairs
        keys = integers(rng, half, size, self.pairs)
        values = half + integers(rng, self.vocab_size - half, size, self.pairs)
        places = start + distinct(rng, self.length - 1 - start, self.pairs, size)
        filler = integers(rng, self.vocab_size, size, self.length)
        repeated = (keys[:, :, None] == keys[:, None, :]).sum(2) > 1
        return _recall(filler, keys, values, places, seen=_seen_in_filler(filler, keys, places), repeated=repeated.astype(np.int64))


def _seen_in_filler(filler: np.ndarray, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """1 where the key stood in the filler between the pairs and its query ``[B, D]``, int64."""
    filler = filler.copy()
    np.put_along_axis(filler, places, -1, axis=1)  # a query is no filler
    region = np.arange(filler.shape[1])
    before = (region >= 2 * keys.shape[1]) & (region < places[:, :, None])
    return (before & (filler[:, None, :] == keys[:, :, None])).any(2).astype(np.int64)


def _recall(tokens: np.ndarray, keys: np.ndarray, values: np.ndarray, places: np.ndarray, **strata: np.ndarray) -> Batch:
    """Write pairs to the head of ``tokens`` and keys to ``places``; ask for the value after. ``strata``: a number a query ``[B, D]``."""
    pairs = keys.shape[1]
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(tokens, places, keys, axis=1)
    labels = at_places(tokens.shape, places + 1, values, IGNORE)
    strata = {"gap": doubling(places - (2 * np.arange(pairs) + 1)), **strata}
    return finish(tokens, labels, **{name: at_places(tokens.shape, places + 1, numbers, 0) for name, numbers in strata.items()})
