"""The tasks of the Kaczmarz Linear Attention paper at and beyond the length of training: its setting, fresh examples, three seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fastweights.recipes.task_rows import half_answered, kept_rows, spread, standings_table
from fastweights.recipes.task_standings import standings
from fastweights.report.plots import Curve, curves
from fastweights.report.tasks import whole

QUESTION = "Do KLA's own tasks tell KLA from Gated DeltaNet beyond the length of training, and does CCQ help (fresh examples, three seeds)?"
MIXERS = ("gated_deltanet", "kla", "kla+ccq")
PUBLISHED_STATE = {"mqar-kla": 36_864, "one-pair-kla": 36_864, "palindrome-kla": 73_728, "stack-kla": 73_728}
SETTING = f"--mixers {' '.join(MIXERS)} --at-once 9 --precision bf16 --minutes 25"
"""Three mixers at three rates, or with three seeds, begin together and go on in step. After its minutes a call ends; another goes on."""


class Part(NamedTuple):
    """A task: how it is called, its grid, and what the paper has for its own models (rate 10⁻³, one seed) at the lengths measured."""

    title: str
    grid: str
    published: dict[str, tuple[float, ...]]


ONE_RATE = "--learning-rates 0.001 --seeds 0 1 2"
PARTS = {
    "mqar-kla": Part(
        "MQAR, trained at 256",
        "--seeds 0 --more-seeds 1 2",
        {"gated_deltanet": (98.74, 98.36, 94.31, 66.81), "kla": (98.35, 98.16, 95.64, 73.84)},
    ),
    "one-pair-kla": Part(
        "one pair, trained at 1,024",
        ONE_RATE,
        {"gated_deltanet": (98.85, 98.25, 98.05, 98.50), "kla": (100.0, 100.0, 100.0, 100.0)},
    ),
    "palindrome-kla": Part(
        "palindrome, trained at 1,024",
        f"{ONE_RATE} --samples 500",
        {"gated_deltanet": (99.94, 99.81, 98.24, 80.74), "kla": (99.84, 99.50, 97.22, 75.96)},
    ),
    "stack-kla": Part(
        "stack, trained at 1,024",
        f"{ONE_RATE} --samples 500",
        {"gated_deltanet": (99.93, 99.73, 98.94, 95.64), "kla": (99.97, 99.85, 99.25, 96.94)},
    ),
}
"""The most decisive first."""
STRATA = {
    "mqar-kla": ("seen", ("the filler has not shown the key", "it has")),
    "one-pair-kla": ("seen", ("the filler has not shown the key", "it has")),
    "stack-kla": ("covered", ("the latest value pushed there", "one that lay below another")),
}
"""What tells the questions of a task apart, and how the two kinds are called."""
Row = dict[str, Any]


def run(lab: Any) -> None:
    for task, part in PARTS.items():
        lab.fastweights(task, f"compare --task {task} {part.grid} {SETTING}")


def rows(folder: Path) -> list[Row]:
    kept = []
    for task in PARTS:
        found = kept_rows(folder / task, strata=STRATA[task][:1] if task in STRATA else (), task=task)
        kept += sorted(found, key=lambda row: (MIXERS.index(row["label"]), row["learning_rate"], row["seed"]))
    return kept


def _standings(rows: list[Row]) -> dict[str, list[Row]]:
    """By task, of the tasks that have rows: each mixer at its best rate in training."""
    found = {task: standings([row for row in rows if row["task"] == task]) for task in PARTS}
    return {task: of_task for task, of_task in found.items() if of_task}


def answer(rows: list[Row]) -> str:
    parts = []
    for task, found in _standings(rows).items():
        scores = ", ".join(f"{one['label']} {spread(whole(one)[-1])}" for one in found)
        parts.append(f"{PARTS[task].title}, at {whole(found[0])[-1]['length']:,}: {scores}")
    return f"accuracy in %, in brackets the worst and the best seed: {'; '.join(parts)}"


def table(rows: list[Row]) -> str:
    lines = []
    for task, found in _standings(rows).items():
        lines += standings_table(PARTS[task].title, found, mean=False)
        for label, scores in PARTS[task].published.items():
            cells = [f"{label}, published", f"{PUBLISHED_STATE[task]:,}", "0.001", "1", "", *(f"{score:.2f}" for score in scores)]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(_strata_table(task, found) if task in STRATA else []), *_seed_table(task, rows)]
    note = (
        "Accuracy in %, by length; in brackets the worst and the best seed, or with one seed the 95 % interval. "
        f"{len(rows)} runs, {sum(row['diverged'] for row in rows)} of which ended in a loss that is not finite."
    )
    return "\n".join([*lines, note, ""])


def _strata_table(task: str, found: list[Row]) -> list[str]:
    """The two kinds of questions, at the greatest length."""
    stratum, names = STRATA[task]
    length = max(score["length"] for score in found[0]["accuracy"])
    lines = [f"| at {length:,} | {' | '.join(names)} |", "|---|---|---|"]
    for one in found:
        by_value = {score["value"]: spread(score) for score in one["accuracy"] if (score["stratum"], score["length"]) == (stratum, length)}
        lines.append(f"| {one['label']} | {' | '.join(by_value.get(value, '') for value in (0, 1))} |")
    return [*lines, ""]


def _seed_table(task: str, rows: list[Row]) -> list[str]:
    """Run by run: when half of the questions came to be answered in training, and what is answered at the greatest length."""
    runs: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["task"] == task:
            runs.setdefault((row["label"], row["learning_rate"]), []).append(row)
    length = whole(next(iter(runs.values()))[0])[-1]["length"]
    lines = [f"| {PARTS[task].title}, by seed | rate | half answered at step | at {length:,} |", "|---|---|---|---|"]
    for (label, rate), found in runs.items():
        ends = [f"{100 * whole(row)[-1]['accuracy']:.1f}" for row in found]
        lines.append(f"| {label} | {rate:.2g} | {' · '.join(map(half_answered, found))} | {' · '.join(ends)} |")
    return [*lines, ""]


def figure(rows: list[Row]) -> str:
    task, found = next(iter(_standings(rows).items()))
    lines = []
    for one in found:
        lengths, *shares = zip(*((score["length"], score["accuracy"], score["low"], score["high"]) for score in whole(one)), strict=True)
        lines.append(Curve(one["label"], lengths, *([100 * share for share in part] for part in shares)))
    return str(
        curves(
            lines,
            x_label=f"tokens ({PARTS[task].title})",
            y_label="accuracy, %",
            y_range=(0, 100),
            log_x=True,
            markers=True,
            description=f"Accuracy by length, a line a mixer: {PARTS[task].title}.",
        )
    )
