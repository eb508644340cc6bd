"""Follow a state: the running product of group elements, asked after every element. Parity (Z2), S3 and S5.

A linear memory with eigenvalues in [0, 1] cannot follow even parity at any length; negative eigenvalues (``eta_max=2``) are what it takes
(Grazzi et al., arXiv 2411.12537). S5 is complete for NC¹ (Merrill et al., arXiv 2404.08819).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from fastweights.tasks.base import IGNORE, Batch, Task, doubling, finish, require
from fastweights.tasks.draw import integers

POINTS = {"parity": 2, "s3": 3, "s5": 5}
"""The groups, as all permutations of so many points."""
MOVES = ("all", "swaps")


@dataclass(frozen=True, kw_only=True)
class StateTracking(Task):
    """``x_1 … x_n END``, each x a uniformly random move; at x_t the state ``x_t ∘ … ∘ x_1`` is asked. Token g is the g-th permutation in
    lexicographic order (0 is the identity). Stratum ``position``: t, up to the next power of two."""

    name: ClassVar[str] = "state_tracking"

    length: int = 128
    """Tokens a sequence: length − 1 moves and END."""
    group: str = "parity"
    """``parity`` (2 states), ``s3`` (6) or ``s5`` (120)."""
    moves: str = "all"
    """``all`` elements of the group, or only its ``swaps``, each of which one negative-eigenvalue step of a delta rule can do."""

    def __post_init__(self) -> None:
        require(self.length >= 2, f"length is {self.length}; a move and END need at least 2 tokens")
        require(self.group in POINTS, f"group is {self.group!r}; it must be one of {', '.join(POINTS)}")
        require(self.moves in MOVES, f"moves is {self.moves!r}; it must be one of {', '.join(MOVES)}")
        require(not (self.group == "parity" and self.moves == "swaps"), "parity has a single swap: moves='swaps' is for s3 and s5")

    @property
    def states(self) -> int:
        """Elements of the group."""
        return len(permutations(self.group))

    @property
    def vocab_size(self) -> int:
        return self.states + 1

    @property
    def chance(self) -> float:
        """The best guess knows the position: after t moves it says the likeliest state. With all elements as moves that is 1 / states;
        with swaps alone the state's sign is known, and the first states are few."""
        law, moves, product = np.eye(self.states)[0], _moves(self.group, self.moves), products(self.group)
        best = []
        for _ in range(self.length - 1):
            law = np.bincount(product[moves].ravel(), weights=np.tile(law, len(moves)), minlength=self.states) / len(moves)
            best.append(law.max())
        return float(np.mean(best))

    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        moves = _moves(self.group, self.moves)
        moved = moves[integers(rng, len(moves), size, self.length - 1)]
        tokens = np.full((size, self.length), self.states, dtype=np.int64)
        tokens[:, :-1] = moved
        labels = np.full_like(tokens, IGNORE)
        labels[:, 1:] = running_products(self.group, moved)
        position = np.zeros_like(tokens)
        position[:, 1:] = doubling(np.arange(1, self.length))
        return finish(tokens, labels, position=position)


@cache
def permutations(group: str) -> np.ndarray:
    """The group's elements as permutations ``[states, points]``, in lexicographic order."""
    return np.array(list(itertools.permutations(range(POINTS[group]))), dtype=np.int64)


@cache
def products(group: str) -> np.ndarray:
    """``[states, states]``: entry (g, h) is g∘h, "first h, then g": (g∘h)(i) = g(h(i))."""
    elements = permutations(group)
    base = elements.shape[1] ** np.arange(elements.shape[1])[::-1]
    order = elements @ base  # lexicographic order is numeric order of the digits
    composed = elements[:, elements]  # [g, h, i] = g[h[i]]
    return np.searchsorted(order, composed @ base)


def running_products(group: str, moved: np.ndarray) -> np.ndarray:
    """The states ``x_t ∘ … ∘ x_1`` of moves ``[B, n]``, in log n doubling passes: products are associative."""
    product, state, reach = products(group), moved.copy(), 1
    while reach < moved.shape[1]:
        state[:, reach:] = product[state[:, reach:], state[:, :-reach]]
        reach *= 2
    return state


def _moves(group: str, moves: str) -> np.ndarray:
    elements = permutations(group)
    if moves == "all":
        return np.arange(len(elements))
    return np.flatnonzero((elements != np.arange(elements.shape[1])).sum(1) == 2)
