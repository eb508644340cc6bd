"""Compare mixers on a task: each is trained from scratch for every learning rate and seed, and measured; rows come as runs finish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastweights.recipes.task_job import TaskJob
from fastweights.recipes.task_presets import TaskSettings

Row = dict[str, Any]


def jobs_of(preset: str, settings: TaskSettings, labels: Sequence[str], *, folder: Path, device: str) -> list[TaskJob]:
    """The grid: for each learning rate and seed every mixer. Raises ValueError, before anything runs, for a mixer that does not exist."""
    for label in labels:
        TaskJob(preset=preset, settings=settings, label=label, learning_rate=1.0, seed=0, folder=folder, device=device).model()
    return [
        TaskJob(preset=preset, settings=settings, label=label, learning_rate=rate, seed=seed, folder=folder, device=device)
        for rate in settings.learning_rates
        for seed in settings.seeds
        for label in labels
    ]


class Standing(NamedTuple):
    """A mixer on one measured task, at the mixer's best learning rate."""

    label: str
    evaluation: str
    """What tells the task from the others of the preset: ``length 64, pairs 4``."""
    length: int
    accuracy: float
    """Mean over the seeds."""
    low: float
    """The lowest seed; with a single one, the low end of its confidence interval."""
    high: float
    """The highest seed; with a single one, the high end of its confidence interval."""
    seeds: int
    learning_rate: float
    chance: float
    ceiling: float


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """For each mixer the learning rate with the best mean accuracy in training over its seeds; what is measured in the end has no say."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row["label"], {}).setdefault(row["learning_rate"], []).append(row["train_accuracy"])
    return {label: max(rates, key=lambda rate: float(np.mean(rates[rate]))) for label, rates in found.items()}


def standings(rows: Sequence[Row]) -> list[Standing]:
    """One for each mixer and measured task of the ``task`` rows of one preset."""
    rates = best_rates(rows)
    measured: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["learning_rate"] == rates[row["label"]]:
            for one in row["accuracy"]:
                if one["stratum"] is None:
                    measured.setdefault((row["label"], evaluation_name(one)), []).append(one)
    result = []
    for (label, evaluation), found in measured.items():
        values, one = [row["accuracy"] for row in found], found[0]
        low, high = (one["low"], one["high"]) if len(found) == 1 else (min(values), max(values))
        mean = float(np.mean(values))
        result.append(Standing(label, evaluation, one["length"], mean, low, high, len(found), rates[label], one["chance"], one["ceiling"]))
    return result


def evaluation_name(row: Row) -> str:
    """``length 64, pairs 4``: what tells one measured task of a preset from the others."""
    return ", ".join(f"{name} {row[name]}" for name in ("length", "pairs") if name in row)
