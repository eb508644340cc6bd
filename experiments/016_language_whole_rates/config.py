"""Experiment 012 again, with each mixer's learning rate chosen by whole trainings: short ones chose rates that do not compare."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from fastweights.records import read_rows

QUESTION = "Each at the best of its rates over a whole training: which mixer models language best at 25 M parameters, and does CCQ help?"
_before = Path(__file__).parent.parent / "012_language_small_start"
_names = runpy.run_path(str(_before / "config.py"))["run"].__globals__
_names["SHORT_STEPS"] = _names["STEPS"]
_names["RATES"] = (2e-3, 4e-3)
_names["RATES_OF"] = dict.fromkeys(("gla", "gla+ccq", "mamba2"), (2e-3,)) | {"transformer": (5e-4, 1e-3)}
"""What is trained here; 012 has whole trainings of gdn, kla, gla, gla+ccq and mamba2 at 10⁻³."""
OF_A_MODEL = {"training", "gates", "documents", "curves", "scores"}
"""What rows say of a whole training that is not needed to choose a rate."""
Row = dict[str, Any]
_rates_here = _names["_rates"]


def _rates(folder: Path) -> list[Row]:
    """Whole trainings of seed 0: those here, and 012's at rates that were not tried again."""
    found = _rates_here(folder)
    known = {(row["label"], row["learning_rate"]) for row in found}
    before = [row for row in read_rows(_before / "results.jsonl") if row["kind"] == "language" and row["seed"] == 0]
    others = [row for row in before if (row["label"], row["learning_rate"]) not in known]
    return found + [{name: row[name] for name in row.keys() - OF_A_MODEL} | {"kind": "rate"} for row in others]


def _long(label: str, seed: int, rate: float | None) -> str:
    """The run of seed 0 that chose the rate is not done again."""
    return f"{label}-{rate}-seed{seed}"


_names |= {"_rates": _rates, "_long": _long, "_short": lambda label, rate: _long(label, 0, rate)}
run, rows, answer, table, figure = (_names[name] for name in ("run", "rows", "answer", "table", "figure"))


def model(folder: Path, label: str, seed: int) -> Path:
    """Where the training of a label and seed at its best rate leaves its model, which need not be there yet."""
    return folder / _long(label, seed, _names["_best"](_rates(folder)).get(label)) / "model"
