"""Experiment 007 again, with the mixers' last projections starting at a tenth of their size: it drowned the embedding before."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

QUESTION = "With a start that does not drown the embedding: which mixer models language best at 25 M parameters, and does CCQ help?"
START = 0.1
"""`out_proj_init` of all mixers, as 011 has it."""
AGAIN = "again"
"""Folder of runs that were done a second time with the same command."""
_007 = runpy.run_path(str(Path(__file__).parent.parent / "007_language_25m" / "config.py"))
_names = _007["run"].__globals__
_names["MIXERS"] = {label: f"{mixer}:out_proj_init={START}" for label, mixer in _007["MIXERS"].items()}
_names["RATES"] = (5e-4, 1e-3, 2e-3)
run, answer, figure = (_007[name] for name in ("run", "answer", "figure"))
Row = dict[str, Any]


def rows(folder: Path) -> list[Row]:
    again = [row | {"kind": AGAIN} for row in _007["rows"](folder / AGAIN) if row["kind"] == "language"]
    return _007["rows"](folder) + again


def table(rows: list[Row]) -> str:
    return "\n".join([_007["table"](rows), *_again_table(rows)])


def _again_table(rows: list[Row]) -> list[str]:
    """What the same command gives twice, on two machines of one kind."""
    lines = ["| the same command twice, bits per byte | | | apart |", "|---|---|---|---|"]
    for second in (row for row in rows if row["kind"] == AGAIN):
        (first,) = [row for row in rows if row["kind"] == "language" and (row["label"], row["seed"]) == (second["label"], second["seed"])]
        a, b = first["bits_per_byte"]["value"], second["bits_per_byte"]["value"]
        lines.append(f"| {second['label']} | {a:.4f} | {b:.4f} | {abs(a - b):.4f} |")
    return [*lines, ""] if len(lines) > 2 else []
