"""The mixers that experiment 003 left below 99 %, at other learning rates and for twice as long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves

QUESTION = "Is it the learning rate that keeps GLA, Mamba-2 and softmax from recall in 003 (MQAR, 64 tokens, 4 pairs, d 64)?"
MIXERS = ("gla", "mamba2", "softmax")
RATES = (1e-3, 5e-3, 1e-2)
STEPS = 4000
KEPT = ("label", "parameters", "state_floats", "learning_rate", "steps", "reached", "train_accuracy", "seconds")
ORIGIN = ("command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    rates = " ".join(f"{rate:g}" for rate in RATES)
    lab.fastweights("mqar", f"compare --task mqar --mixers {' '.join(MIXERS)} --learning-rates {rates} --steps {STEPS} --seeds 0")


def rows(folder: Path) -> list[Row]:
    kept = []
    for row in read_rows(folder / "mqar" / "results.jsonl"):
        whole = [score for score in row["accuracy"] if score["stratum"] is None]
        few = {name: row[name] for name in (*KEPT, *ORIGIN)}
        kept.append(few | {"accuracy": whole, "n": whole[0]["asked"], "training": [[step, share] for step, _, share, _ in row["training"]]})
    return sorted(kept, key=lambda row: (MIXERS.index(row["label"]), row["learning_rate"]))


def _best(rows: list[Row]) -> list[Row]:
    """Of each mixer, the run that recalls most."""
    return [max((row for row in rows if row["label"] == label), key=lambda row: row["accuracy"][0]["accuracy"]) for label in MIXERS]


def answer(rows: list[Row]) -> str:
    found = [f"{row['label']} {100 * row['accuracy'][0]['accuracy']:.0f} % at {row['learning_rate']:g}" for row in _best(rows)]
    return f"the best of {len(RATES)} rates, one seed, {STEPS:,} steps: {', '.join(found)}"


def table(rows: list[Row]) -> str:
    lengths = [score["length"] for score in rows[0]["accuracy"]]
    lines = [
        f"| mixer | learning rate | accuracy in training | {' | '.join(f'{length} tokens' for length in lengths)} |",
        "|---|---|---|" + "---|" * len(lengths),
    ]
    for row in rows:
        scores = [f"{100 * s['accuracy']:.1f} ({100 * s['low']:.1f}–{100 * s['high']:.1f})" for s in row["accuracy"]]
        lines.append(f"| {row['label']} | {row['learning_rate']:g} | {100 * row['train_accuracy']:.1f} | {' | '.join(scores)} |")
    note = f"Accuracy in %, n = {rows[0]['n']:,} questions a length, 95 % interval; trained at {lengths[0]} tokens; chance 0.8 %."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        steps, shares = zip(*row["training"], strict=True)
        lines.append(Curve(f"{row['label']}, {row['learning_rate']:g}", list(steps), [100 * share for share in shares]))
    return str(
        curves(lines, x_label="step", y_label="accuracy in training, %", y_range=(0, 100), description="Accuracy by step, a curve a run.")
    )
