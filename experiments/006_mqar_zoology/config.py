"""The field's recall benchmark for every mixer at two widths: a grid of learning rates on one seed, the best rate on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.recipes.task_rows import kept_rows, mean_accuracy, standings_table
from fastweights.recipes.task_standings import standings
from fastweights.report.plots import Curve, curves

QUESTION = "How much does each mixer recall for its state (MQAR by Zoology's definition, d 64 and 128)?"
MIXERS = ("gated_deltanet", "gated_deltanet+ccq", "kla", "kla+ccq", "deltanet", "deltanet+ccq", "gla", "gla+ccq", "mamba2", "softmax")
WIDTHS = (64, 128)
SEEDS = (0, 1, 2)
RUNS = len(WIDTHS) * len(MIXERS) * (4 + len(SEEDS) - 1)
"""With all of them done: four rates on the first seed, and the best on the others."""
MINUTES = 20
"""Of one call, a width; another call goes on."""
PRECISION = "bf16"
"""Of training, for every mixer alike; what is measured is in float32."""
Row = dict[str, Any]


def run(lab: Any) -> None:
    more = " ".join(str(seed) for seed in SEEDS[1:])
    for width in WIDTHS:
        lab.fastweights(
            f"d{width}",
            f"compare --task mqar-zoology-{width} --mixers {' '.join(MIXERS)} --seeds {SEEDS[0]} --more-seeds {more}"
            f" --precision {PRECISION} --minutes {MINUTES}",
        )


def rows(folder: Path) -> list[Row]:
    kept = [row for width in WIDTHS for row in kept_rows(folder / f"d{width}", width=width)]
    return sorted(kept, key=lambda row: (row["width"], MIXERS.index(row["label"]), row["learning_rate"], row["seed"]))


def _measured(rows: list[Row]) -> list[int]:
    return [width for width in WIDTHS if any(row["width"] == width for row in rows)]


def _standings(rows: list[Row], width: int) -> list[Row]:
    """Each mixer at its best rate in training, in the order of the mixers."""
    return standings([row for row in rows if row["width"] == width])


def answer(rows: list[Row]) -> str:
    parts = []
    for width in _measured(rows):
        ordered = sorted(_standings(rows, width), key=mean_accuracy, reverse=True)
        found = [f"{standing['label']} {mean_accuracy(standing):.0f} %" for standing in ordered]
        parts.append(f"d {width}: {', '.join(found)}")
    so_far = "" if len(rows) == RUNS else f" (so far {len(rows)} of {RUNS} runs)"
    return f"mean accuracy over (64, 4) … (1,024, 256), each mixer at the best of four rates{so_far}; {'; '.join(parts)}"


def table(rows: list[Row]) -> str:
    lines = []
    for width in _measured(rows):
        lines += [*standings_table(f"d {width}", _standings(rows, width), mean=True), ""]
    note = (
        "Accuracy in %, by length and pairs; in brackets the worst and the best seed, or with one seed the 95 % interval. "
        f"{len(rows)} runs, {sum(row['diverged'] for row in rows)} of which ended in a loss that is not finite; chance 0.02 %."
    )
    return "\n".join([*lines, note, ""])


def figure(rows: list[Row]) -> str:
    lines = []
    for label in MIXERS:
        found = [standing for width in _measured(rows) for standing in _standings(rows, width) if standing["label"] == label]
        if found and all(standing["state_floats"] for standing in found):
            lines.append(Curve(label, [standing["state_floats"] for standing in found], [mean_accuracy(standing) for standing in found]))
    return str(
        curves(
            lines,
            x_label="floats of state",
            y_label="mean accuracy, %",
            y_range=(0, 100),
            log_x=True,
            markers=True,
            description="Mean accuracy by size of the state, a line a mixer from d 64 to d 128.",
        )
    )
