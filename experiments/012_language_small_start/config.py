"""Experiment 007 again, with the mixers' last projections starting at a tenth of their size: it drowned the embedding before."""

from __future__ import annotations

import runpy
from pathlib import Path

QUESTION = "With a start that does not drown the embedding: which mixer models language best at 25 M parameters, and does CCQ help?"
START = 0.1
"""`out_proj_init` of all mixers, as 011 has it."""
_007 = runpy.run_path(str(Path(__file__).parent.parent / "007_language_25m" / "config.py"))
_names = _007["run"].__globals__
_names["MIXERS"] = {label: f"{mixer}:out_proj_init={START}" for label, mixer in _007["MIXERS"].items()}
_names["RATES"] = (5e-4, 1e-3, 2e-3)
run, rows, answer, table, figure = (_007[name] for name in ("run", "rows", "answer", "table", "figure"))
