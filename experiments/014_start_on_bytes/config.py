"""Experiment 004's trainings with another question: how the mixers' last projections start, on the demo's bytes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import mean_estimate
from fastweights.report.plots import bars

QUESTION = "Does a smaller start of the mixers' last projections help on the demo's bytes, and is it why KLA is behind there?"
MIXERS = ("gated_deltanet", "kla")
STARTS = (1.0, 0.1)
"""`out_proj_init`."""
_004 = runpy.run_path(str(Path(__file__).parent.parent / "004_value_over_key_norm" / "config.py"))
_004["run"].__globals__["VARIANTS"] = VARIANTS = [f"{mixer}:out_proj_init={start}" for mixer in MIXERS for start in STARTS]
run, rows, _bits = (_004[name] for name in ("run", "rows", "_bits"))
Row = dict[str, Any]


def answer(rows: list[Row]) -> str:
    bits = _bits(rows)
    parts = []
    for mixer in MIXERS:
        large, small = (bits[f"{mixer}:out_proj_init={start}"] for start in STARTS)
        parts.append(f"{mixer} {' and '.join(f'{b - a:+.3f}' for a, b in zip(large, small, strict=True))}")
    return f"bits per byte that a tenth of the published start changes, a number a seed: {', '.join(parts)}"


def table(rows: list[Row]) -> str:
    bits = _bits(rows)
    lines = ["| mixer | start | bits per byte, by seed | mean |", "|---|---|---|---|"]
    for mixer in MIXERS:
        for start in STARTS:
            found = bits[f"{mixer}:out_proj_init={start}"]
            lines.append(f"| {mixer} | {start:g} | {', '.join(f'{value:.3f}' for value in found)} | {mean_estimate(found).value:.3f} |")
    note = f"n = {rows[0]['n']:,} bytes of held-out source; seeds {', '.join(map(str, _004['SEEDS']))}, learning rate {_004['RATE']:g}."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    bits = _bits(rows)
    values = [mean_estimate(bits[label]).value for label in VARIANTS]
    names = [label.replace(":out_proj_init=", ", start ") for label in VARIANTS]
    return str(bars(names, values, x_label="bits per byte", description="Bits per byte of both mixers with both starts."))
