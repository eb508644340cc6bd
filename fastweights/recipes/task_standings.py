"""Rows of runs on a task joined into one standing per mixer, as results.json, the terminal's table and the report show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """For each mixer the learning rate with the best mean accuracy in training over its seeds; what is measured in the end has no say.

    Of rates with unequally many seeds only those with most: which others got the rest was chosen already.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row["label"], {}).setdefault(row["learning_rate"], []).append(row["train_accuracy"])
    return {label: max(rates, key=lambda rate: (len(rates[rate]), float(np.mean(rates[rate])))) for label, rates in found.items()}


def standings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a mixer, of its best learning rate: its mean over the seeds on everything measured.

    ``low`` and ``high`` of a measurement are the worst and the best seed; with a single one, the ends of its confidence interval.
    """
    rates = best_rates(rows)
    return [_standing([row for row in rows if row["label"] == label and row["learning_rate"] == rate]) for label, rate in rates.items()]


def _standing(runs: Sequence[Row]) -> dict[str, Any]:
    first = runs[0]
    measured: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        for row in run["accuracy"]:
            measured.setdefault((evaluation_name(row), row["stratum"], row["value"]), []).append(row)
    return {
        "label": first["label"],
        "learning_rate": first["learning_rate"],
        "seeds": [run["seed"] for run in runs],
        "parameters": first["parameters"],
        "state_floats": first["state_floats"],
        "train_accuracy": float(np.mean([run["train_accuracy"] for run in runs])),
        "steps": float(np.mean([run["steps"] for run in runs])),
        "training": first["training"],
        "accuracy": [_joined(found) for found in measured.values()],
    }


def _joined(found: Sequence[Row]) -> dict[str, Any]:
    one, values = found[0], [row["accuracy"] for row in found]
    low, high = (one["low"], one["high"]) if len(found) == 1 else (min(values), max(values))
    kept = {name: one[name] for name in ("task", "length", "chance", "ceiling", "stratum", "value")}
    pairs = {"pairs": one["pairs"]} if "pairs" in one else {}
    return {"evaluation": evaluation_name(one), **kept, **pairs, "accuracy": float(np.mean(values)), "low": low, "high": high}


def evaluation_name(row: Row) -> str:
    """``length 64, pairs 4``: what tells one measured task of a preset from the others."""
    return ", ".join(f"{name} {row[name]}" for name in ("length", "pairs") if name in row)
