"""Experiment 012 again, with each mixer's learning rate chosen by whole trainings: short ones chose rates that do not compare."""

from __future__ import annotations

import runpy
from pathlib import Path

QUESTION = "Each at the best of its rates over a whole training: which mixer models language best at 25 M parameters, and does CCQ help?"
_012 = runpy.run_path(str(Path(__file__).parent.parent / "012_language_small_start" / "config.py"))
_names = _012["run"].__globals__
_names["SHORT_STEPS"] = _names["STEPS"]
_names["RATES"] = (1e-3, 2e-3, 4e-3)
_names["RATES_OF"] = dict.fromkeys(("gla", "gla+ccq", "mamba2"), (1e-3, 2e-3)) | {"transformer": (5e-4, 1e-3)}
# What chose the rate is the run of seed 0, which then is not done again.
_names["_long"] = lambda label, seed, rate: f"{label}-{rate}-seed{seed}"
_names["_short"] = lambda label, rate: _names["_long"](label, 0, rate)
run, rows, answer, table, figure = (_names[name] for name in ("run", "rows", "answer", "table", "figure"))


def model(folder: Path, label: str, seed: int) -> Path:
    """Where the training of a label and seed at its best rate has left its model, which need not be there yet."""
    return folder / _names["_long"](label, seed, _names["_best"](_names["_rates"](folder)).get(label)) / "model"
