"""One task of the harness, run: its metrics, each with the interval that its samples allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api import metrics
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from fastweights.evaluate.accuracy import interval
from fastweights.evaluate.harness.model import HarnessModel
from fastweights.evaluate.harness.tasks import quiet
from fastweights.evaluate.statistics import Estimate, mean_estimate, ratio_estimate
from fastweights.tasks import Count

UNKNOWN = "N/A"


class Measured(NamedTuple):
    """What a task says of a model."""

    scores: list[dict[str, Any]]
    """Each ``metric``, ``value``, ``low``, ``high``, ``higher_is_better``; intervals are 95 %, None where the samples give none."""
    samples: int
    truncated: int
    """Texts of which a part had to go for want of room."""
    prompt_tokens: tuple[int, float, int]
    """Fewest, mean, most tokens of a prompt; of a whole text where nothing is asked of it."""


def run_task(model: HarnessModel, task: Task, *, limit: int | None = None, few_shot: int | None = None) -> Measured:
    """The task's metrics on its first ``limit`` rows (None: all); values are the harness's own.

    Args:
        few_shot: examples before each question; None: as many as the task says, else none.
    """
    if few_shot is not None or task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=few_shot or 0)
    task.set_fewshot_seed(seed=1234)  # the harness's
    model.truncated = 0
    with quiet():
        results = evaluate(lm=model, task_dict={"tasks": {task.task_name: task}}, limit=limit, bootstrap_iters=0)
    assert results is not None
    whole, samples = results["results"][task.task_name], results["samples"][task.task_name]
    better, found = task.higher_is_better(), []
    for name, how in task.aggregation().items():
        for filter_ in dict.fromkeys(sample["filter"] for sample in samples):
            value = whole.get(f"{name},{filter_}", UNKNOWN)
            if value == UNKNOWN:
                continue
            values = [sample[name] for sample in samples if sample["filter"] == filter_ and name in sample]
            label = name if filter_ == "none" else f"{name} ({filter_})"
            ends = _interval(values, how)._asdict() | {"value": float(value)}
            found.append({"metric": label, "higher_is_better": bool(better[name])} | ends)
    first = samples[0]["filter"]
    lengths = [len(model.tok_encode(texts[0] or texts[-1])) for texts in (s["arguments"][0] for s in samples if s["filter"] == first)]
    spread = (min(lengths), sum(lengths) / len(lengths), max(lengths))
    return Measured(found, len(lengths), model.truncated, spread)


def _interval(values: Sequence[Any], how: Any) -> Estimate:
    """By how the harness joins the samples; an estimate without ends for ways it is not known for."""
    if how is metrics.mean:
        if set(values) <= {0, 1}:
            right = torch.tensor([int(value) for value in values])
            count = Count.of(right, torch.ones_like(right))
            return Estimate(count.accuracy, *interval(count))
        return mean_estimate([float(value) for value in values])
    if how is metrics.perplexity:
        return _mapped(mean_estimate([-value for value in values]), math.exp)
    if how in (metrics.weighted_perplexity, metrics.bits_per_byte):
        estimate = ratio_estimate([-likelihood for likelihood, _ in values], [float(weight) for _, weight in values])
        return _mapped(estimate, math.exp if how is metrics.weighted_perplexity else lambda nats: nats / math.log(2))
    return Estimate(math.nan, None, None)


def _mapped(estimate: Estimate, f: Callable[[float], float]) -> Estimate:
    low, high = (None if part is None else f(part) for part in (estimate.low, estimate.high))
    return Estimate(f(estimate.value), low, high)
