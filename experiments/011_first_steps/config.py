"""The first steps on text, with the mixers' last projection starting as large as KLA's code has it, and smaller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastweights.records import read_rows
from fastweights.report.plots import Curve, beside, curves

QUESTION = "Why does Mamba-2 lead the first steps on text: do the other mixers' outputs drown the embedding?"
MIXERS = {"gdn": "gated_deltanet", "kla": "kla", "gla": "gla", "mamba2": "mamba2", "transformer": "softmax"}
PUBLISHED, SMALL = 1.0, 0.1
"""`out_proj_init`."""
RATE = 1e-3
RUNS = [(label, start, RATE) for label in MIXERS for start in (PUBLISHED, SMALL)]
RUNS += [("gdn", start, RATE) for start in (0.35, 0.0)] + [("gdn", start, 3 * RATE) for start in (PUBLISHED, SMALL)]
"""(mixer, start, learning rate)."""
LANES = 2
SETTING = (
    "train --data $FASTWEIGHTS_DATA/corpus/english/train.parquet --validation $FASTWEIGHTS_DATA/corpus/english/validation.parquet "
    "--tokenizer $FASTWEIGHTS_DATA/tokenizer --sequence-length 256 --batch-tokens 2048 --steps 60 --warmup 0.15 --log-every 5 "
    "--save-every 60 --keep-checkpoints 1 --validation-tokens 32768 --longest 1 --length-tokens 256 --sample-tokens 0 --no-tensorboard "
    "--hidden-size 256 --num-hidden-layers 4 --num-heads 4 --intermediate-size 680"
)
ORIGIN = ("command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    chains = [[(_name(*one), _training(*one))] for one in RUNS]
    failed = lab.together(chains, LANES)
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)}")


def _name(label: str, start: float, rate: float) -> str:
    return f"{label}-start-{start:g}-rate-{rate:g}"


def _training(label: str, start: float, rate: float) -> str:
    return f"{SETTING} --learning-rate {rate:g} --mixer {MIXERS[label]}:out_proj_init={start}"


def rows(folder: Path) -> list[Row]:
    kept = []
    for label, start, rate in RUNS:
        result = folder / _name(label, start, rate) / "result.json"
        if result.exists():
            row = json.loads(result.read_text())
            score = {"bits_per_byte": row["validation"]["bits_per_byte"], "n": row["validation"]["tokens"]}
            losses = [[point["step"], round(point["loss"], 4)] for point in read_rows(result.parent / "metrics.jsonl")]
            few = {name: row[name] for name in ("parameters", "tokens", "seconds", *ORIGIN)}
            kept.append({"label": label, "start": start, "learning_rate": rate, "losses": losses} | few | score)
    return kept


def _found(rows: list[Row]) -> dict[tuple[str, float, float], Row]:
    return {(row["label"], row["start"], row["learning_rate"]): row for row in rows}


def _bits(row: Row) -> float:
    return row["bits_per_byte"]["value"]


def answer(rows: list[Row]) -> str:
    found = _found(rows)
    parts = [f"{label} {_bits(found[label, PUBLISHED, RATE]):.2f} → {_bits(found[label, SMALL, RATE]):.2f}" for label in MIXERS]
    return f"bits per byte after 60 steps, the mixers' last projection starting as published → at a tenth: {', '.join(parts)}"


def table(rows: list[Row]) -> str:
    found = _found(rows)
    starts = sorted({row["start"] for row in rows}, reverse=True)
    lines = [f"| mixer | rate | {' | '.join(f'start {start:g}' for start in starts)} |", "|---" * (2 + len(starts)) + "|"]
    for label, rate in dict.fromkeys((label, rate) for label, _, rate in found):
        bits = [f"{_bits(found[label, start, rate]):.3f}" if (label, start, rate) in found else "" for start in starts]
        lines.append(f"| {label} | {rate:g} | {' | '.join(bits)} |")
    note = f"Bits per byte of {rows[0]['n']:,} validation tokens after 60 steps of 2,048, by `out_proj_init`; one seed."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    found, figures = _found(rows), []
    for start in (PUBLISHED, SMALL):
        lines = []
        for label in MIXERS:
            points = found[label, start, RATE]["losses"]
            lines.append(Curve(label, [step for step, _ in points], [loss for _, loss in points]))
        names = {"x_label": f"steps, start {start:g}", "y_label": "loss, nats a piece"}
        figures.append(curves(lines, **names, y_range=(5.5, 10.5), description=f"Training loss by step, start {start:g}, a line a mixer."))
    return str(beside(figures, description="Training loss by step with both starts, a line a mixer."))
