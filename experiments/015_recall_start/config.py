"""When recall begins in training, with the mixers' last projection starting as published and at a tenth of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.recipes.task_rows import half_answered, kept_rows
from fastweights.report.plots import Curve, beside, curves
from fastweights.report.tasks import whole

QUESTION = "Does a smaller start of the mixers' last projections let recall begin earlier in training (MQAR, 64 tokens, 4 pairs, d 64)?"
MIXERS = ("gated_deltanet", "kla")
STARTS = (1.0, 0.1)
"""`out_proj_init`."""
SEEDS = (0, 1, 2, 3)
Row = dict[str, Any]


def _label(mixer: str, start: float) -> str:
    return f"{mixer}:out_proj_init={start}"


def run(lab: Any) -> None:
    mixers = [_label(mixer, start) for mixer in MIXERS for start in STARTS]
    lab.fastweights("mqar", f"compare --task mqar --mixers {' '.join(mixers)} --seeds {' '.join(map(str, SEEDS))}")


def rows(folder: Path) -> list[Row]:
    order = {_label(mixer, start): {"mixer": mixer, "start": start} for mixer in MIXERS for start in STARTS}
    kept = [order[row["label"]] | row for row in kept_rows(folder / "mqar")]
    return sorted(kept, key=lambda row: (list(order).index(row["label"]), row["seed"]))


def _runs(rows: list[Row], mixer: str, start: float) -> list[Row]:
    return [row for row in rows if (row["mixer"], row["start"]) == (mixer, start)]


def answer(rows: list[Row]) -> str:
    parts = [f"{mixer} {' → '.join(', '.join(map(half_answered, _runs(rows, mixer, start))) for start in STARTS)}" for mixer in MIXERS]
    return f"steps until half is answered, a number a seed, start as published → at a tenth: {'; '.join(parts)}"


def table(rows: list[Row]) -> str:
    lengths = [score["length"] for score in whole(rows[0])]
    head = ["mixer", "start", "half answered at step, by seed", "in training, %", *(f"{length} tokens" for length in lengths)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for mixer in MIXERS:
        for start in STARTS:
            found = _runs(rows, mixer, start)
            ends = [" · ".join(f"{100 * whole(row)[n]['accuracy']:.1f}" for row in found) for n in range(len(lengths))]
            trained = [f"{100 * row['train_accuracy']:.1f}" for row in found]
            cells = [mixer, f"{start:g}", " · ".join(map(half_answered, found)), " · ".join(trained)]
            lines.append(f"| {' | '.join([*cells, *ends])} |")
    note = f"Seeds {', '.join(map(str, SEEDS))}; n = {whole(rows[0])[0]['asked']:,} questions a length, in %; chance 0.8 %."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    parts = []
    for mixer in MIXERS:
        lines = []
        for start in STARTS:
            for row in _runs(rows, mixer, start):
                steps, shares = zip(*row["training"], strict=True)
                lines.append(Curve(f"start {start:g}, seed {row['seed']}", list(steps), [100 * share for share in shares]))
        names = {"x_label": f"step of {mixer}", "y_label": "accuracy in training, %", "y_range": (0, 100)}
        parts.append(curves(lines, **names, description=f"Accuracy by step of {mixer}, a curve a run."))
    return str(beside(parts, description="Accuracy in training by step, a curve a run, both mixers."))
