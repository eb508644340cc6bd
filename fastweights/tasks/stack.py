"""Many stacks at once: ``PUSH id value`` and ``POP id ?``; say what the pop returns. As in the Kaczmarz Linear Attention paper (arXiv
2605.08587)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastweights.tasks.base import IGNORE, Batch, Task, finish, require
from fastweights.tasks.draw import integers, scale_down, words


@dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Operations of three tokens, then END. A push goes to a uniformly random stack, a pop to a uniformly random stack that is not
    empty; the answer is asked at ``?`` and never shown. Strata: ``depth``, values on the stack before the pop (up to ``max_depth``);
    ``covered``, 1 where another value was pushed on top and popped since, so that remembering the latest push is not enough."""

    name: ClassVar[str] = "stack"

    length: int = 1024
    """Tokens a sequence, at most: (length − 1) // 3 operations and END."""
    stacks: int = 64
    """Different stacks."""
    values: int = 26
    """Different values."""
    push_probability: float = 0.6
    """Probability of a push; with no value on any stack an operation is always a push."""
    max_depth: int = 8
    """Pops from deeper stacks are counted in the stratum of this depth."""

    def __post_init__(self) -> None:
        require(self.length >= 7, f"length is {self.length}; a push, a pop and END need at least 7 tokens")
        require(self.stacks >= 1, f"stacks is {self.stacks}; at least 1 is needed")
        require(self.values >= 2, f"values is {self.values}; at least 2 are needed")
        require(0 < self.push_probability < 1, f"push_probability is {self.push_probability}; it must lie between 0 and 1")
        require(self.max_depth >= 1, f"max_depth is {self.max_depth}; at least 1 is needed")

    @property
    def vocab_size(self) -> int:
        return self.values + self.stacks + 4

    @property
    def chance(self) -> float:
        return 1 / self.values

    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        operations, row = (self.length - 1) // 3, np.arange(size)
        wants_push = scale_down(words(rng, operations, size), 1 << 32) < round(self.push_probability * 2**32)
        push_to = integers(rng, self.stacks, operations, size)
        pop_from = words(rng, operations, size)
        value = integers(rng, self.values, operations, size)

        height = np.zeros((size, self.stacks), dtype=np.int64)
        content = np.zeros((size, self.stacks, operations), dtype=np.int16 if self.values < 1 << 15 else np.int64)
        under = np.zeros((size, self.stacks, operations), dtype=bool)  # has something lain on this value?
        pushes, chosen, depth, covered = (np.zeros((operations, size), dtype=np.int64) for _ in range(4))
        for t in range(operations):
            filled = (height > 0).cumsum(1)  # the r-th stack that is not empty is where this first passes r
            push = wants_push[t] | (filled[:, -1] == 0)
            rank = scale_down(pop_from[t], np.maximum(filled[:, -1], 1))
            stack = np.where(push, push_to[t], (filled > rank[:, None]).argmax(1))
            top = height[row, stack] - ~push  # where a push writes, and a pop reads
            depth[t], pushes[t], chosen[t] = height[row, stack], push, stack
            below = np.maximum(top - 1, 0)
            covered[t] = under[row, stack, top]
            under[row, stack, below] |= push & (top > 0)
            under[row, stack, top] &= ~push
            value[t] = np.where(push, value[t], content[row, stack, top])
            content[row, stack, top] = value[t]
            height[row, stack] += np.where(push, 1, -1)
        return self._batch(pushes.T == 1, chosen.T, value.T, np.minimum(depth, self.max_depth).T, covered.T)

    def _batch(self, push: np.ndarray, stack: np.ndarray, value: np.ndarray, depth: np.ndarray, covered: np.ndarray) -> Batch:
        """Tokens from what happened, all ``[B, operations]``. Ids: values, stacks, then PUSH, POP, ?, END."""
        PUSH, POP, UNKNOWN, END = range(self.values + self.stacks, self.vocab_size)
        size, operations = push.shape
        tokens = np.full((size, 3 * operations + 1), END, dtype=np.int64)
        tokens[:, 0:-1:3] = np.where(push, PUSH, POP)
        tokens[:, 1:-1:3] = self.values + stack
        tokens[:, 2:-1:3] = np.where(push, value, UNKNOWN)

        def after_the_question(numbers: np.ndarray, fill: int) -> np.ndarray:
            out = np.full(tokens.shape, fill, dtype=np.int64)
            out[:, 3::3] = np.where(push, fill, numbers)
            return out

        return finish(tokens, after_the_question(value, IGNORE), depth=after_the_question(depth, 0), covered=after_the_question(covered, 0))
