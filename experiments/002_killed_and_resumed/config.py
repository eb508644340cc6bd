"""A training that is killed without warning, beside one that is not."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves

QUESTION = "Does a training that is killed (`kill -9`) twice and resumed leave a trace in the loss?"
KILLED_AFTER = (70, 185)
"""Steps."""
SETTING = (
    "train --preset kla+ccq-5m --device cpu --steps 300 --batch-tokens 2048 --no-tensorboard --log-every 1 --save-every 20 "
    "--data $FASTWEIGHTS_DATA/corpus/english/train.parquet --validation $FASTWEIGHTS_DATA/corpus/english/validation.parquet "
    "--tokenizer $FASTWEIGHTS_DATA/tokenizer"
)
CURVE = ("step", "tokens", "loss", "grad_norm", "learning_rate")
Row = dict[str, Any]


def run(lab: Any) -> None:
    lab.fastweights("straight", SETTING)
    metrics = lab.folder / "killed" / "metrics.jsonl"
    for steps in KILLED_AFTER:
        if len(read_rows(metrics)) >= steps:  # in an earlier call
            continue
        process = lab.start("killed", SETTING)
        while process.poll() is None and len(read_rows(metrics)) < steps:
            time.sleep(0.5)
        if process.poll() is not None:
            raise SystemExit(f"the training ended by itself before step {steps}: {process.returncode}")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lab.fastweights("killed", SETTING)


def rows(folder: Path) -> list[Row]:
    kept = []
    for name in ("straight", "killed"):
        result = json.loads((folder / name / "result.json").read_text())
        curve = [{field: point[field] for field in CURVE} for point in read_rows(folder / name / "metrics.jsonl")]
        few = ("preset", "parameters", "tokens", "seconds", "sample", "sessions", "command", "commit", "device", "versions", "time", "seed")
        score = {"bits_per_byte": result["validation"]["bits_per_byte"], "n": result["validation"]["tokens"]}
        kept.append({"run": name, "curve": curve} | score | {field: result[field] for field in few})
    return kept


def _differences(rows: list[Row], field: str) -> list[float]:
    straight, killed = (row["curve"] for row in rows)
    return [abs(a[field] - b[field]) for a, b in zip(straight, killed, strict=True)]


def answer(rows: list[Row]) -> str:
    worst, sessions = max(_differences(rows, "loss")), len(rows[1]["sessions"])
    return (
        f"no: {len(rows[0]['curve'])} steps in one session and in {sessions} differ by {worst:.2g} nats at most "
        f"({rows[0]['parameters'] / 1e6:.1f} M parameters, {rows[0]['tokens']:,} tokens of English)"
        if worst <= 1e-6
        else f"yes: the losses of {sessions} sessions differ by up to {worst:.2g} nats from those of one"
    )


def table(rows: list[Row]) -> str:
    lines = ["| run | sessions | loss at steps 1, 100, 200, 300 | bits per byte on held-out text |", "|---|---|---|---|"]
    for row in rows:
        losses = ", ".join(f"{row['curve'][step - 1]['loss']:.4f}" for step in (1, 100, 200, 300))
        bits = row["bits_per_byte"]
        half = (bits["high"] - bits["low"]) / 2
        lines.append(f"| {row['run']} | {len(row['sessions'])} | {losses} | {bits['value']:.4f} ± {half:.4f} (n = {row['n']:,} tokens) |")
    loss, norm = max(_differences(rows, "loss")), max(_differences(rows, "grad_norm"))
    return "\n".join([*lines, "", f"Over all steps the losses differ by {loss:.2g} at most, the gradient norms by {norm:.2g}.", ""])


def figure(rows: list[Row]) -> str:
    lines = [Curve(row["run"], [point["step"] for point in row["curve"]], [point["loss"] for point in row["curve"]]) for row in rows]
    restarts = [(float(step), "killed") for step in KILLED_AFTER]
    return str(
        curves(lines, x_label="step", y_label="loss, nats a token", marks=restarts, description="Two training curves, one over the other.")
    )
