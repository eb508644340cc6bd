"""KLA with one difference to Gated DeltaNet taken back at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import mean_estimate
from fastweights.records import read_rows
from fastweights.report.plots import bars

QUESTION = "What of KLA costs it bits on the demo's text: the value divided by ‖k‖, or the norms around it?"
VARIANTS = {
    "gated_deltanet": "k/‖k‖, v",
    "kla": "k/‖k‖, v/‖k‖",
    "kla:eps=0.01": "n² = ‖k‖² + 0.01",
    "kla:eps=1.0": "n² = ‖k‖² + 1: small keys stay small, and their values are not blown up",
    "kla:key_norm=learned": "n² = softplus(c)·‖k‖² + ε",
    "kla:q_norm=none": "q as it comes",
}
RATE = 3e-3
SEEDS = (0, 1)
SETTING = (
    f"compare --steps 600 --batch-tokens 1024 --sequence-length 256 --learning-rate {RATE:g} --seeds {' '.join(map(str, SEEDS))} "
    "--validation-tokens 131072 --longest 1 --length-tokens 256 --sample-tokens 1"
)
KEPT = ("label", "parameters", "tokens", "seconds", "command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    lab.fastweights("variants", f"{SETTING} --mixers {' '.join(VARIANTS)}")


def rows(folder: Path) -> list[Row]:
    kept = []
    for row in read_rows(folder / "variants" / "results.jsonl"):
        score = {"bits_per_byte": row["validation"]["bits_per_byte"], "n": row["validation"]["tokens"]}
        kept.append({name: row[name] for name in KEPT} | score)
    return sorted(kept, key=lambda row: (list(VARIANTS).index(row["label"]), row["seed"]))


def _bits(rows: list[Row]) -> dict[str, list[float]]:
    """Of every seed, by variant."""
    found: dict[str, list[float]] = {label: [] for label in VARIANTS}
    for row in rows:
        found[row["label"]].append(row["bits_per_byte"]["value"])
    return found


def answer(rows: list[Row]) -> str:
    bits = {label: mean_estimate(values).value for label, values in _bits(rows).items()}
    gap = bits["kla"] - bits["gated_deltanet"]
    back = {label: f"{100 * (bits['kla'] - bits[label]) / gap:.0f} %" for label in VARIANTS}
    return (
        f"{len(SEEDS)} seeds do not settle it: ε = 1 takes back {back['kla:eps=1.0']} of {gap:.3f} bits, ε = 0.01 {back['kla:eps=0.01']}, "
        f"but changes that should do nothing take back {back['kla:key_norm=learned']} and {back['kla:q_norm=none']}"
    )


def table(rows: list[Row]) -> str:
    lines = ["| variant | what is written | bits per byte, by seed | mean − gated_deltanet |", "|---|---|---|---|"]
    bits = _bits(rows)
    for label, written in VARIANTS.items():
        difference = mean_estimate([a - b for a, b in zip(bits[label], bits["gated_deltanet"], strict=True)]).value
        each = ", ".join(f"{value:.3f}" for value in bits[label])
        lines.append(f"| {label} | {written} | {each} | {f'{difference:+.3f}' if label != 'gated_deltanet' else ''} |")
    note = f"n = {rows[0]['n']:,} bytes of held-out source; seeds {', '.join(map(str, SEEDS))}, learning rate {RATE:g}."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    bits = {label: mean_estimate(values).value for label, values in _bits(rows).items()}
    gaps = [bits[label] - bits["gated_deltanet"] for label in list(VARIANTS)[1:]]
    label = "bits per byte above gated_deltanet"
    return str(bars(list(VARIANTS)[1:], gaps, x_label=label, description="How far each variant of KLA is behind Gated DeltaNet."))
