"""A needle in a haystack, after RULER (Hsieh et al., arXiv 2404.06654): one sentence holds a magic value; repeat it at the end.

``variant`` 1 hides a number among one repeated line, 2 a number in natural text, 3 a UUID in natural text. Prompts are worded as RULER and
lm-evaluation-harness word them; docs/tasks.md lists the departures.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch

from fastweights.tasks.base import IGNORE, Batch, Count, Score, Task, require, score_tokens
from fastweights.tasks.draw import words
from fastweights.tasks.text import ADJECTIVES, NOUNS, ByteTokenizer, encode, split_sentences

REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
PROMPT = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
DEPTHS: tuple[int, ...] = tuple(int(d) for d in np.linspace(0, 100, 40).round())
"""RULER's 40 depths, in percent of the haystack's sentences before the needle."""


@dataclass(frozen=True, kw_only=True)
class NeedleBatch(Batch):
    """Needles as text and as tokens. ``input_ids`` is the prompt and its answer, padded on the right with 0; ``labels`` asks for the
    answer's tokens, so that a model can be trained on it. Stratum ``depth``: percent of the haystack before the needle."""

    prompts: list[str]
    """What a model continues."""
    values: list[str]
    """What its continuation must contain."""
    prompt_ids: list[list[int]]
    """The prompts' tokens."""
    depth: np.ndarray
    """Percent of the haystack before each needle ``[B]``, int64."""

    @property
    def prompt_tokens(self) -> np.ndarray:
        """The real lengths of the prompts ``[B]``; they fall short of the nominal one by up to a sentence and the room for the answer."""
        return np.array([len(ids) for ids in self.prompt_ids], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class SNIAH(Task):
    """The task at one nominal length. For a grid, make one per length and depth: ``dataclasses.replace(task, length=…, depth=…)``."""

    name: ClassVar[str] = "s_niah"

    variant: int = 1
    """1: number in a repeated line. 2: number in natural text. 3: UUID in natural text."""
    length: int = 1024
    """Nominal length in tokens: the prompt and ``new_tokens`` fit in it."""
    depth: int | None = None
    """Percent of the haystack's sentences before the needle; None draws one of RULER's 40 for every sample."""
    new_tokens: int = 128
    """Room left for the answer, and the most tokens to generate."""
    random_start: bool = False
    """Start the natural text at a random sentence. False starts at its beginning as RULER does: all samples of a length then share one
    haystack."""
    haystack: str | None = field(default=None, repr=False)
    """Natural text for variants 2 and 3 (1 has its own line); read in a circle when it is shorter than ``length``."""
    tokenizer: Any = field(default=ByteTokenizer(), repr=False)
    """Measures lengths and makes ``input_ids``: a Hugging Face tokenizer, anything with ``encode``, or a callable from text to token
    ids."""

    def __post_init__(self) -> None:
        require(self.variant in (1, 2, 3), f"variant is {self.variant}; it must be 1, 2 or 3")
        require(self.depth is None or 0 <= self.depth <= 100, f"depth is {self.depth}; it is a percentage, 0 to 100, or None")
        require(self.new_tokens >= 1, f"new_tokens is {self.new_tokens}; at least 1 is needed")
        require(
            self.variant == 1 or bool(self.haystack and self.haystack.strip()),
            f"variant {self.variant} hides the needle in natural text: give it as haystack=…, for example the essays RULER uses",
        )
        shortest = len(encode(self.tokenizer, self._prompt("patient-mountain", self._value_of(0, 0), [], 0))) + self.new_tokens
        require(self.length >= shortest, f"length is {self.length}; the question and {self.new_tokens} new tokens alone take {shortest}")

    @property
    def vocab_size(self) -> int:
        if not hasattr(self.tokenizer, "vocab_size"):
            raise ValueError(f"the tokenizer {self.tokenizer!r} has no vocab_size; one with it is needed to train on this task")
        return max(self.tokenizer.vocab_size, len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else 0)

    @property
    def chance(self) -> float:
        """One number out of 9 million, or one UUID out of 2¹²²."""
        return 2.0**-122 if self.variant == 3 else 1 / 9e6

    def batch(self, size: int, rng: np.random.Generator) -> NeedleBatch:
        return self._tokens([self._sample(rng) for _ in range(size)])

    def score(self, answers: Any, batch: Batch) -> Score:
        """Continuations as a list of texts: right where the value occurs in one, whatever the case. Logits or predicted tokens: per
        answer token, as any task."""
        if isinstance(answers, torch.Tensor):
            return score_tokens(answers, batch)
        assert isinstance(batch, NeedleBatch)
        require(len(answers) == len(batch.values), f"there are {len(answers)} continuations for {len(batch.values)} needles")
        right = torch.tensor([value.lower() in text.lower() for value, text in zip(batch.values, answers, strict=True)])
        by_depth = {int(d): Count.of(right[batch.depth == d], torch.ones(int((batch.depth == d).sum()))) for d in np.unique(batch.depth)}
        return Score(Count.of(right, torch.ones(len(right))), {"depth": by_depth})

    @property
    def _kind(self) -> str:
        return "uuid" if self.variant == 3 else "number"

    @property
    def _seam(self) -> str:
        return "\n" if self.variant == 1 else " "

    def _value_of(self, high: int, low: int) -> str:
        """A value from two raw 64-bit words: a random UUID (version 4), or seven digits without a leading zero."""
        if self.variant == 3:
            return str(uuid.UUID(int=high << 64 | low, version=4))
        return str(1_000_000 + ((high >> 32) * 9_000_000 >> 32))

    def _prompt(self, key: str, value: str, sentences: Sequence[str], depth: int) -> str:
        at = int(len(sentences) * (depth / 100))
        needle = NEEDLE.format(kind=self._kind, key=key, value=value)
        context = self._seam.join([*sentences[:at], needle, *sentences[at:]])
        return PROMPT.format(kind=self._kind, key=key, context=context)

    def _sample(self, rng: np.random.Generator) -> tuple[str, str, list[int], int]:
        """Prompt, value, prompt tokens and depth: as much haystack as fits, to the sentence."""
        adjective, noun, start, grid = (int(x) for x in words(rng, 4) >> np.uint64(32))
        key = f"{ADJECTIVES[adjective * len(ADJECTIVES) >> 32]}-{NOUNS[noun * len(NOUNS) >> 32]}"
        value = self._value_of(*(int(x) for x in words(rng, 2)))
        depth = DEPTHS[grid * len(DEPTHS) >> 32] if self.depth is None else self.depth

        sentences, sizes = _measured(None if self.variant == 1 else self.haystack, self._seam, self.tokenizer)
        first = start * len(sentences) >> 32 if self.random_start else 0

        def prompt(count: int) -> tuple[str, list[int]]:
            text = self._prompt(key, value, [sentences[(first + i) % len(sentences)] for i in range(count)], depth)
            return text, encode(self.tokenizer, text)

        budget = self.length - self.new_tokens
        count = _how_many_fit(np.roll(sizes, -first), budget - len(prompt(0)[1]))  # a guess: tokens of joined sentences do not quite add up
        best = prompt(count)
        while count and len(best[1]) > budget:
            count, best = count - 1, prompt(count - 1)
        while len((longer := prompt(count + 1))[1]) <= budget:
            count, best = count + 1, longer
        return best[0], value, best[1], depth

    def _tokens(self, samples: list[tuple[str, str, list[int], int]]) -> NeedleBatch:
        rows, starts = [], []
        for prompt, value, ids, _ in samples:
            row = encode(self.tokenizer, f"{prompt} {value}")
            differs = (i for i, (a, b) in enumerate(zip(row, ids, strict=False)) if a != b)
            starts.append(next(differs, len(ids)))  # a tokenizer may merge across the seam, or end the prompt with a special token
            rows.append(row)
        depth = np.array([sample[3] for sample in samples], dtype=np.int64)
        input_ids = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORE)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            input_ids[i, : len(row)] = torch.tensor(row)
            labels[i, start : len(row)] = input_ids[i, start : len(row)]
        return NeedleBatch(
            input_ids=input_ids,
            labels=labels,
            groups={"depth": torch.from_numpy(depth)[:, None].expand_as(input_ids)},
            prompts=[sample[0] for sample in samples],
            values=[sample[1] for sample in samples],
            prompt_ids=[sample[2] for sample in samples],
            depth=depth,
        )


@lru_cache(maxsize=8)
def _measured(haystack: str | None, seam: str, tokenizer: Any) -> tuple[list[str], np.ndarray]:
    """The haystack's sentences (None: the one repeated line) and the tokens each adds, int64."""
    sentences = [REPEATED] if haystack is None else split_sentences(haystack)
    special = len(encode(tokenizer, ""))
    return sentences, np.array([max(1, len(encode(tokenizer, seam + sentence)) - special) for sentence in sentences], dtype=np.int64)


def _how_many_fit(sizes: np.ndarray, room: int) -> int:
    """How many of the sizes, read in a circle, add up to at most ``room``."""
    turns, rest = divmod(max(room, 0), int(sizes.sum()))
    return turns * len(sizes) + int(np.searchsorted(sizes.cumsum(), rest, side="right"))
