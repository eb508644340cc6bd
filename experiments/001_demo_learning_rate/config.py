"""The demo at four learning rates, and each mixer's best on three seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import mean_estimate
from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves

QUESTION = "Is KLA behind Gated DeltaNet on the demo's text, or is it the demo's learning rate?"
MIXERS = ("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq")
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
SEEDS = (0, 1, 2)
SETTING = (
    "compare --steps 600 --batch-tokens 1024 --sequence-length 256 --validation-tokens 131072 --longest 1 --length-tokens 256 "
    "--sample-tokens 1"
)
KEPT = ("label", "parameters", "tokens", "seconds", "command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    for rate in RATES:
        lab.fastweights(f"rate-{rate:g}", f"{SETTING} --learning-rate {rate:g} --mixers {' '.join(MIXERS)} --seeds {SEEDS[0]}")
    best = _best(rows(lab.folder))
    for rate in sorted(set(best.values())):
        mixers = [label for label in MIXERS if best[label] == rate]
        seeds = " ".join(str(seed) for seed in SEEDS[1:])
        lab.fastweights(f"seeds-{rate:g}", f"{SETTING} --learning-rate {rate:g} --mixers {' '.join(mixers)} --seeds {seeds}")


def rows(folder: Path) -> list[Row]:
    kept = []
    for part in sorted(folder.glob("*-*/results.jsonl")):
        for row in read_rows(part):
            score = {"bits_per_byte": row["validation"]["bits_per_byte"], "n": row["validation"]["tokens"]}
            kept.append({name: row[name] for name in KEPT} | score | {"learning_rate": row["train"]["learning_rate"]})
    return sorted(kept, key=lambda row: (MIXERS.index(row["label"]), row["learning_rate"], row["seed"]))


def _bits(rows: list[Row], label: str, rate: float) -> dict[int, float]:
    """By seed."""
    return {row["seed"]: row["bits_per_byte"]["value"] for row in rows if (row["label"], row["learning_rate"]) == (label, rate)}


def _best(rows: list[Row]) -> dict[str, float]:
    """Each mixer's learning rate, chosen on the first seed."""
    return {label: min(RATES, key=lambda rate: _bits(rows, label, rate)[SEEDS[0]]) for label in MIXERS}


def _at_best(rows: list[Row]) -> dict[str, list[float]]:
    """Bits of every seed, at each mixer's rate."""
    best = _best(rows)
    return {label: [_bits(rows, label, best[label])[seed] for seed in SEEDS] for label in MIXERS}


def _difference(rows: list[Row], label: str, to: str = MIXERS[0]) -> str:
    bits = _at_best(rows)
    value, low, high = mean_estimate([a - b for a, b in zip(bits[label], bits[to], strict=True)])
    return f"{value:+.3f} ({low:+.3f} … {high:+.3f})"


def answer(rows: list[Row]) -> str:
    return (
        f"each at its best of four rates, three seeds, 0.3 M parameters: kla − gated_deltanet {_difference(rows, 'kla')} bits per byte, "
        f"with CCQ {_difference(rows, 'kla+ccq', 'gated_deltanet+ccq')}"
    )


def table(rows: list[Row]) -> str:
    best, bits = _best(rows), _at_best(rows)
    lines = [
        f"| mixer | {' | '.join(f'{rate:g}' for rate in RATES)} | best rate, {len(SEEDS)} seeds | difference to {MIXERS[0]} |",
        "|---|" + "---|" * (len(RATES) + 2),
    ]
    for label in MIXERS:
        cells = [f"{_bits(rows, label, rate)[SEEDS[0]]:.3f}" for rate in RATES]
        cells[RATES.index(best[label])] = f"**{cells[RATES.index(best[label])]}**"
        cells += [f"{mean_estimate(bits[label]).value:.3f}", "" if label == MIXERS[0] else _difference(rows, label)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    note = (
        f"Bits per byte on {rows[0]['n']:,} bytes of held-out source, by learning rate at seed {SEEDS[0]}; then the mean of "
        f"seeds {', '.join(map(str, SEEDS))} at the rate in bold, and the difference with its 95 % interval over the seeds."
    )
    return "\n".join([*lines, "", note, ""])


def figure(rows: list[Row]) -> str:
    lines = [Curve(label, [1000 * rate for rate in RATES], [_bits(rows, label, rate)[SEEDS[0]] for rate in RATES]) for label in MIXERS]
    names = {"x_label": "learning rate, thousandths", "y_label": "bits per byte"}
    return str(curves(lines, **names, log_x=True, markers=True, description="Bits per byte by learning rate: a curve for each mixer."))
