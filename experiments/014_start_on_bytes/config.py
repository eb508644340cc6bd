"""The start of the mixers' last projections on the demo's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import mean_estimate
from fastweights.records import read_rows
from fastweights.report.plots import bars

QUESTION = "Does a smaller start of the mixers' last projections help on the demo's bytes, and is it why KLA is behind there?"
MIXERS = ("gated_deltanet", "kla")
STARTS = (1.0, 0.1)
"""`out_proj_init`."""
RATE = 3e-3
SEEDS = (0, 1)
VARIANTS = [f"{mixer}:out_proj_init={start}" for mixer in MIXERS for start in STARTS]
SETTING = (
    f"compare --steps 600 --batch-tokens 1024 --sequence-length 256 --learning-rate {RATE:g} --seeds {' '.join(map(str, SEEDS))} "
    f"--validation-tokens 131072 --longest 1 --length-tokens 256 --sample-tokens 1 --mixers {' '.join(VARIANTS)}"
)
KEPT = ("label", "parameters", "tokens", "seconds", "command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    lab.fastweights("starts", SETTING)


def rows(folder: Path) -> list[Row]:
    kept = []
    for row in read_rows(folder / "starts" / "results.jsonl"):
        score = {"bits_per_byte": row["validation"]["bits_per_byte"], "n": row["validation"]["tokens"]}
        kept.append({name: row[name] for name in KEPT} | score)
    return sorted(kept, key=lambda row: (VARIANTS.index(row["label"]), row["seed"]))


def _bits(rows: list[Row]) -> dict[str, list[float]]:
    """Of every seed, by variant."""
    return {label: [row["bits_per_byte"]["value"] for row in rows if row["label"] == label] for label in VARIANTS}


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
    note = f"n = {rows[0]['n']:,} bytes of held-out source; seeds {', '.join(map(str, SEEDS))}, learning rate {RATE:g}."
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    bits = _bits(rows)
    values = [mean_estimate(bits[label]).value for label in VARIANTS]
    names = [label.replace(":out_proj_init=", ", start ") for label in VARIANTS]
    return str(bars(names, values, x_label="bits per byte", description="Bits per byte of both mixers with both starts."))
