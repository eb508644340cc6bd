"""Experiment 010 again, of the models that 016 trains."""

from __future__ import annotations

import runpy
from pathlib import Path

QUESTION = "In models with a better start: what do η, the decays and λ learn, and do needle keys avoid the directions that CCQ removes?"
_here = Path(__file__).parent.parent
_names = runpy.run_path(str(_here / "010_what_is_learned" / "config.py"))["run"].__globals__
_names["TRAINED"] = "016_language_whole_rates"
_names["_model"] = runpy.run_path(str(_here / _names["TRAINED"] / "config.py"))["model"]
run, rows, answer, table, figure = (_names[name] for name in ("run", "rows", "answer", "table", "figure"))
