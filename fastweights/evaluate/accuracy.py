"""Accuracy on the tasks, by length, pairs and depth: streaming over batches, with the number of questions and a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import torch
from torch import nn

from fastweights.tasks import Batch, Count, NeedleBatch, Score, Task, generator

EVALUATION_SEED = 2**31
"""Where evaluation data begin: far from the small seeds that trainings draw their examples with, and the same for every model."""
DRAWN_AT_ONCE = 32
"""Sequences drawn by one call of a task. Fixed, so that the data, and with them the score, do not depend on the model's batch size."""

Model = Callable[..., Any]
"""A Hugging Face causal language model, or a callable: from ``input_ids [B, T]`` to logits ``[B, T, vocabulary]`` or predicted tokens
``[B, T]``; for needles from a list of prompts to the list of their continuations."""


def accuracy(
    model: Model,
    tasks: Iterable[Task],
    *,
    samples: int = 1000,
    seed: int = EVALUATION_SEED,
    batch_tokens: int = 32_768,
    confidence: float = 0.95,
    on_samples: Callable[[int], None] = lambda done: None,
) -> Iterator[dict[str, Any]]:
    """Rows for a result file, as they come: for each task the whole, then its strata (``stratum`` and ``value`` are None for the whole).

    ``low`` and ``high`` bound the accuracy at the given confidence (`interval`). Needles are generated greedily and looked for in the
    continuation; all other tasks are read in one pass. ``batch_tokens`` bounds the tokens of a forward pass, never the result.
    ``on_samples`` is told how many sequences each step did.
    """
    for part in measured(model, tasks, samples=samples, seed=seed, batch_tokens=batch_tokens, confidence=confidence):
        if isinstance(part, int):
            on_samples(part)
        else:
            yield part


def measured(
    model: Model,
    tasks: Iterable[Task],
    *,
    samples: int = 1000,
    seed: int = EVALUATION_SEED,
    batch_tokens: int = 32_768,
    confidence: float = 0.95,
) -> Iterator[int | dict[str, Any]]:
    """`accuracy`, and among its rows the number of sequences of every step as it is done: for who has something to do between steps."""
    for task in tasks:
        score, told = Score(), list[int]()
        for batch in batches(task, samples, seed=seed, batch_tokens=batch_tokens):
            score += task.score(_answers(model, task, batch), batch)
            told += batch.prompt_tokens.tolist() if isinstance(batch, NeedleBatch) else []
            yield len(batch)
        fixed = {"task": task.name, **task.parameters(), "chance": task.chance, "ceiling": task.ceiling}
        if told:
            fixed |= {"prompt_tokens": sum(told) / len(told), "shortest_prompt": min(told), "longest_prompt": max(told)}
        strata: list[tuple[str | None, int | None, Count]] = [(None, None, score.total)]
        strata += [(name, value, counts[value]) for name, counts in score.groups.items() for value in sorted(counts)]
        for stratum, value, count in strata:
            low, high = interval(count, confidence=confidence)
            counted = {"samples": count.samples, "asked": count.asked, "accuracy": count.accuracy, "low": low, "high": high}
            yield fixed | {"stratum": stratum, "value": value} | counted


def batches(task: Task, samples: int, *, seed: int, batch_tokens: int) -> Iterator[Batch]:
    """``samples`` sequences of a task in batches of at most ``batch_tokens`` tokens (or of one). The data depend on the seed alone."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; at least 1 is needed")
    rng, rows = generator(seed), max(1, batch_tokens // task.length)
    for start in range(0, samples, DRAWN_AT_ONCE):
        drawn = task.batch(DRAWN_AT_ONCE, rng)[: samples - start]
        for first in range(0, len(drawn), rows):
            yield drawn[first : first + rows]


def interval(count: Count, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for the accuracy; (0, 1) when nothing was asked.

    Questions of one sequence are not independent: their number is divided by the design effect, which is how much the accuracy varies
    between sequences over how much it would if they were (at least 1). With all right or all wrong there is no spread to measure, and
    questions count as independent.
    """
    if not count.asked:
        return 0.0, 1.0
    p, n = count.accuracy, float(count.asked)
    if 0 < p < 1:
        spread = count.correct_squared - 2 * p * count.correct_asked + p * p * count.asked_squared
        n /= max(1.0, spread / (n * p * (1 - p)))
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def _answers(model: Model, task: Task, batch: Batch) -> Any:
    with _evaluating(model) as device:
        if not isinstance(batch, NeedleBatch):
            output = model(batch.input_ids.to(device))
            return getattr(output, "logits", output)
        if not hasattr(model, "generate"):
            return model(batch.prompts)
        return _continuations(model, task, batch, device)


def _continuations(model: Any, task: Any, batch: NeedleBatch, device: torch.device) -> list[str]:
    """Greedy continuations of the prompts, padded on the left."""
    tokenizer, width = task.tokenizer, int(batch.prompt_tokens.max())
    if not hasattr(tokenizer, "decode"):
        raise ValueError(f"the tokenizer {tokenizer!r} has no decode; continuations of a model cannot be read without it")
    pad = next((i for i in (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None)) if i is not None), 0)
    input_ids = torch.full((len(batch), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(batch.prompt_ids):
        input_ids[row, width - len(ids) :] = torch.tensor(ids)
        mask[row, width - len(ids) :] = 1
    out = model.generate(
        input_ids.to(device), attention_mask=mask.to(device), max_new_tokens=task.new_tokens, do_sample=False, pad_token_id=pad
    )
    return [tokenizer.decode(row) for row in out[:, width:].tolist()]


@contextmanager
def _evaluating(model: Model) -> Iterator[torch.device]:
    """Evaluation mode without gradients, and the device to feed; a module's mode is put back."""
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            yield torch.device("cpu")
        return
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield next((p.device for p in model.parameters()), torch.device("cpu"))
    finally:
        model.train(training)
