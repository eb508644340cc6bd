"""A training that is killed without warning, beside one that is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves

QUESTION = "Does a training that is killed (`kill -9`) twice and resumed leave a trace in the loss?"
KILLED_AFTER = (45, 95)
"""Steps."""
STRAIGHT_STEPS = 130
"""How far the run goes that is not killed; its schedule is that of all 300."""
SETTING = (
    "train --preset kla+ccq-5m --device cpu --steps 300 --batch-tokens 2048 --no-tensorboard --log-every 1 --save-every 20 "
    "--data $FASTWEIGHTS_DATA/corpus/english/train.parquet --validation $FASTWEIGHTS_DATA/corpus/english/validation.parquet "
    "--tokenizer $FASTWEIGHTS_DATA/tokenizer"
)
CURVE = ("step", "tokens", "loss", "grad_norm", "learning_rate")
Row = dict[str, Any]


def run(lab: Any) -> None:
    straight, killed = (lab.folder / name / "metrics.jsonl" for name in ("straight", "killed"))
    if len(read_rows(straight)) < STRAIGHT_STEPS:
        _end_after(STRAIGHT_STEPS, straight, lab.start("straight", SETTING), signal.SIGINT)
    for steps in KILLED_AFTER:
        if len(read_rows(killed)) < steps:  # else in an earlier call
            _end_after(steps, killed, lab.start("killed", SETTING), signal.SIGKILL)
    lab.fastweights("killed", SETTING)


def _end_after(steps: int, metrics: Path, process: subprocess.Popen, by: signal.Signals) -> None:
    while process.poll() is None and len(read_rows(metrics)) < steps:
        time.sleep(0.5)
    if process.poll() is not None:
        raise SystemExit(f"the training ended by itself before step {steps}: {process.returncode}")
    os.killpg(process.pid, by)
    process.wait()


def rows(folder: Path) -> list[Row]:
    result = json.loads((folder / "killed" / "result.json").read_text())
    few = ("preset", "parameters", "tokens", "seconds", "sample", "sessions", "command", "commit", "device", "versions", "time", "seed")
    kept = {name: result[name] for name in few} | {
        "bits_per_byte": result["validation"]["bits_per_byte"],
        "n": result["validation"]["tokens"],
    }
    started = json.loads((folder / "straight" / "run.json").read_text())
    straight = {"preset": result["preset"], "parameters": started["parameters"], "n": STRAIGHT_STEPS, **started["sessions"][0]}
    return [
        {"run": "straight", "curve": _curve(folder / "straight")[:STRAIGHT_STEPS]} | straight,
        {"run": "killed", "curve": _curve(folder / "killed")} | kept,
    ]


def _curve(folder: Path) -> list[Row]:
    return [{field: point[field] for field in CURVE} for point in read_rows(folder / "metrics.jsonl")]


def _differences(rows: list[Row], field: str) -> list[float]:
    straight, killed = (row["curve"] for row in rows)
    return [abs(a[field] - b[field]) for a, b in zip(straight, killed, strict=False)]


def answer(rows: list[Row]) -> str:
    worst, sessions, killed = max(_differences(rows, "loss")), len(rows[1]["sessions"]), rows[1]
    if worst > 1e-6:
        return f"yes: the losses of {sessions} sessions differ by up to {worst:.2g} nats from those of one"
    how = "are equal bit for bit" if worst == 0 else f"differ by {worst:.2g} nats at most"
    return (
        f"no: {len(rows[0]['curve'])} losses of one session, and of {sessions}, {how} ({killed['parameters'] / 1e6:.1f} M parameters with "
        f"embeddings, {killed['tokens']:,} tokens of English)"
    )


def table(rows: list[Row]) -> str:
    lines = ["| run | sessions | loss at steps 1, 50, 100, 130 | at step 300 | bits per byte on held-out text |", "|---|---|---|---|---|"]
    straight, killed = rows
    bits = killed["bits_per_byte"]
    score = f"{bits['value']:.3f} ± {(bits['high'] - bits['low']) / 2:.3f} (n = {killed['n']:,} tokens)"
    for row, sessions, last, measured in (
        (straight, 1, "–", "–"),
        (killed, len(killed["sessions"]), f"{killed['curve'][-1]['loss']:.4f}", score),
    ):
        losses = ", ".join(f"{row['curve'][step - 1]['loss']:.4f}" for step in (1, 50, 100, 130))
        lines.append(f"| {row['run']} | {sessions} | {losses} | {last} | {measured} |")
    loss, norm = max(_differences(rows, "loss")), max(_differences(rows, "grad_norm"))
    sample = " ".join(killed["sample"]["text"].split())[:200]
    note = f"Over {len(straight['curve'])} steps the losses differ by {loss:.2g} at most, the gradient norms by {norm:.2g}."
    return "\n".join([*lines, "", f"{note} After `{killed['sample']['prompt'].splitlines()[0]} …` the model goes on: {sample} …", ""])


def figure(rows: list[Row]) -> str:
    lines = [Curve(row["run"], [point["step"] for point in row["curve"]], [point["loss"] for point in row["curve"]]) for row in rows]
    marks = [(float(step), "killed") for step in KILLED_AFTER]
    return str(
        curves(lines, x_label="step", y_label="loss, nats a token", marks=marks, description="Two training curves, one over the other.")
    )
