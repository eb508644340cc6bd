"""Recall by every mixer at the size of a laptop: Zoology's task, 64 tokens, 4 pairs, d 64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves

QUESTION = "Which mixers learn recall at the size of a laptop (MQAR, 64 tokens, 4 pairs, d 64)?"
MIXERS = ("gated_deltanet", "kla", "deltanet", "gated_deltanet+ccq", "kla+ccq", "deltanet+ccq", "gla", "gla+ccq", "mamba2", "softmax")
RATE = 2e-3
KEPT = ("label", "parameters", "state_floats", "learning_rate", "steps", "reached", "train_accuracy", "seconds")
ORIGIN = ("command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    lab.fastweights("mqar", f"compare --task mqar --mixers {' '.join(MIXERS)} --learning-rates {RATE:g} --seeds 0")


def rows(folder: Path) -> list[Row]:
    kept = []
    for row in read_rows(folder / "mqar" / "results.jsonl"):
        whole = [score for score in row["accuracy"] if score["stratum"] is None]
        few = {name: row[name] for name in (*KEPT, *ORIGIN)}
        kept.append(few | {"accuracy": whole, "n": whole[0]["asked"], "training": [[step, share] for step, _, share, _ in row["training"]]})
    return sorted(kept, key=lambda row: MIXERS.index(row["label"]))


def answer(rows: list[Row]) -> str:
    learned = [row["label"] for row in rows if row["train_accuracy"] >= 0.99]
    rest = [f"{row['label']} {100 * row['accuracy'][0]['accuracy']:.0f} %" for row in rows if row["train_accuracy"] < 0.99]
    return f"one rate, one seed, 2,000 steps: {', '.join(learned)} pass 99 %" + (f"; not yet: {', '.join(rest)}" if rest else "")


def _steps_to(row: Row, share: float) -> str:
    return next((f"{step:,}" for step, accuracy in row["training"] if accuracy >= share), "–")


def table(rows: list[Row]) -> str:
    lengths = [score["length"] for score in rows[0]["accuracy"]]
    lines = [
        f"| mixer | parameters | state, floats | steps to 50 % | to 99 % | {' | '.join(f'{length} tokens' for length in lengths)} |",
        "|---|---|---|---|---|" + "---|" * len(lengths),
    ]
    for row in rows:
        scores = [f"{100 * s['accuracy']:.1f} ({100 * s['low']:.1f}–{100 * s['high']:.1f})" for s in row["accuracy"]]
        size = [f"{row['parameters']:,}", f"{row['state_floats']:,}" if row["state_floats"] else "grows"]
        lines.append(f"| {row['label']} | {' | '.join([*size, _steps_to(row, 0.5), _steps_to(row, 0.99), *scores])} |")
    note = f"Accuracy in %, n = {rows[0]['n']:,} questions a length, 95 % interval; trained at {lengths[0]} tokens; chance 0.8 %."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    lines = [Curve(row["label"], [step for step, _ in row["training"]], [100 * share for _, share in row["training"]]) for row in rows]
    return str(
        curves(lines, x_label="step", y_label="accuracy in training, %", y_range=(0, 100), description="Accuracy by step, a curve a mixer.")
    )
