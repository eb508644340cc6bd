"""Experiment 010 again, of the models that 012 trains."""

from __future__ import annotations

import runpy
from pathlib import Path

QUESTION = "In models with a better start: what do η, the decays and λ learn, and do needle keys avoid the directions that CCQ removes?"
_010 = runpy.run_path(str(Path(__file__).parent.parent / "010_what_is_learned" / "config.py"))
_010["run"].__globals__["TRAINED"] = "012_language_small_start"
run, rows, answer, table, figure = (_010[name] for name in ("run", "rows", "answer", "table", "figure"))
