"""Runs on a task as an experiment keeps them: rows of `fastweights compare --task` cut to what its page shows, and a table of standings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.records import read_rows
from fastweights.report.tasks import whole

Row = dict[str, Any]
KEPT = (
    "label",
    "parameters",
    "state_floats",
    "learning_rate",
    "steps",
    "reached",
    "diverged",
    "train_accuracy",
    "seconds",
    "at_once",
    "compiled",
)
ORIGIN = ("command", "commit", "device", "versions", "time", "seed")


def kept_rows(folder: Path, *, strata: Sequence[str] = (), **named: Any) -> list[Row]:
    """What is kept of the runs that are finished in a comparison's folder, each with ``named`` in front; n counts questions.

    Of what was measured in the end all questions together are kept, and the strata that are asked for.
    """
    found = []
    for row in read_rows(folder / "results.jsonl"):
        accuracy = [score for score in row["accuracy"] if score["stratum"] in (None, *strata)]
        n = sum(score["asked"] for score in whole(row))
        training = [[step, share] for step, _, share, _ in row["training"]]
        few = {name: row[name] for name in (*KEPT, *ORIGIN)}
        found.append(named | few | {"accuracy": accuracy, "n": n, "training": training})
    return found


def mean_accuracy(standing: Mapping[str, Any]) -> float:
    """Over what was measured, in %."""
    return 100 * float(np.mean([score["accuracy"] for score in whole(standing)]))


def half_answered(row: Mapping[str, Any]) -> str:
    """The step at whose end half of the last window's questions were answered, `1,200`, or `never`: when recall began."""
    return next((f"{step:,}" for step, share in row["training"] if share >= 0.5), "never")


def spread(score: Mapping[str, Any]) -> str:
    """`98.3 (97.1–99.0)`: an accuracy in percent and its bounds."""
    return f"{100 * score['accuracy']:.1f} ({100 * score['low']:.1f}–{100 * score['high']:.1f})"


def standings_table(head: str, standings: Sequence[Row], *, mean: bool, names: Mapping[str, str] | None = None) -> list[str]:
    """Lines of a table, a line a mixer: its state, rate, seeds, accuracy in training, then what was measured, by length and pairs.

    Args:
        mean: with a column for the mean over what was measured.
        names: of the mixers, where their labels are not to be shown.
    """
    measured = whole(standings[0]) if standings else []
    several = len({score.get("pairs") for score in measured}) > 1
    places = [f"{score['length']:,}, {score['pairs']}" if several else f"{score['length']:,}" for score in measured]
    columns = [head, "state, floats", "rate", "seeds", "in training", *(["mean"] if mean else []), *places]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for one in standings:
        size = "grows" if one["state_floats"] is None else f"{one['state_floats']:,}"
        few = [size, f"{one['learning_rate']:.2g}", str(len(one["seeds"])), f"{100 * one['train_accuracy']:.1f}"]
        few += [f"{mean_accuracy(one):.1f}"] if mean else []
        lines.append(f"| {' | '.join([(names or {}).get(one['label'], one['label']), *few, *map(spread, whole(one))])} |")
    return lines
