"""A comparison on a task: the table, accuracy by length or pairs, by stratum, over training and learning rates, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.report.comparison import WIDE
from fastweights.report.html import Html, fields, figure, folded, section, table, tag
from fastweights.report.numbers import percent
from fastweights.report.plots import Curve, curves

Standing = Mapping[str, Any]
STRATA = {
    "gap": "tokens between what is asked and where it stood, up to",
    "depth": "depth",
    "position": "place in the sequence, up to",
    "covered": "something was pushed on top and popped since",
    "seen": "the key stood in the filler before",
    "repeated": "several pairs have this key",
}
"""What the strata of the tasks mean, as the label of an axis or the head of a column."""


def sections(results: Mapping[str, Any]) -> Sequence[Html]:
    """The parts of a page for results of kind `task comparison`."""
    return [_verdict(results), _by_axis(results), _by_stratum(results), _training(results), _sources(results)]


def axis_of(measured: Sequence[Mapping[str, Any]]) -> str:
    """What the measured tasks of a preset differ in: ``length``, or ``pairs`` where one length has several."""
    lengths = [one["length"] for one in measured]
    return "length" if len(set(lengths)) == len(lengths) else "pairs"


def whole(standing: Standing) -> list[Mapping[str, Any]]:
    """The measurements over all questions, without the strata."""
    return [one for one in standing["accuracy"] if one["stratum"] is None]


def _spread(standings: Sequence[Standing]) -> str:
    seeds = len(standings[0]["seeds"])
    return (
        f"the worst and the best of {seeds} seeds" if seeds > 1 else "a 95 % interval over sequences; one seed says nothing about another"
    )


def _verdict(results: Mapping[str, Any]) -> Html:
    standings, first = results["standings"], whole(results["standings"][0])
    columns = ["mixer", *(one["evaluation"] for one in first), "parameters", "floats of state", "learning rate", "steps"]
    rows = []
    for one in standings:
        state = "grows" if one["state_floats"] is None else f"{one['state_floats']:,}"
        facts = (f"{one['parameters']:,}", state, f"{one['learning_rate']:.2g}", f"{one['steps']:,.0f}")
        rows.append((one["label"], *(percent(measured) for measured in whole(one)), *facts))
    means = [sum(measured["accuracy"] for measured in whole(one)) for one in standings]
    limits = {f"chance {100 * one['chance']:.3g} %, ceiling {100 * one['ceiling']:.2f} %" for one in first}
    trained = "; ".join(_task(task) for task in results["rows"][0]["train"])
    return section(
        f"Task {results['preset']}",
        tag("p", f"Accuracy in % of the questions. Each mixer was trained from scratch on fresh examples of {trained}."),
        table(
            columns,
            rows,
            strong=means.index(max(means)),
            note=f"In brackets {_spread(standings)}. {'; '.join(sorted(limits))}. The learning rate is the best of the grid by accuracy in"
            " training. Training ends early only when the task is solved.",
        ),
    )


def _task(task: Mapping[str, Any]) -> str:
    return f"{task['task']} ({', '.join(f'{name} {value}' for name, value in task.items() if name not in ('task', 'share'))})"


def _by_axis(results: Mapping[str, Any]) -> Html:
    standings = results["standings"]
    axis = axis_of(whole(standings[0]))
    plot = curves(
        [_curve(one["label"], whole(one), axis) for one in standings],
        x_label="length (tokens)" if axis == "length" else "pairs",
        y_label="accuracy (%)",
        description=f"Accuracy by {axis}, one line per mixer.",
        log_x=True,
        markers=True,
        marks=[(float(max(task[axis] for task in results["rows"][0]["train"])), "most in training")],
        size=WIDE,
    )
    return section(f"By {axis}", figure(plot, f"Bands: {_spread(standings)}."))


def _curve(label: str, measured: Sequence[Mapping[str, Any]], axis: str) -> Curve:
    points = sorted(measured, key=lambda one: one[axis])
    parts = [[100 * one[name] for one in points] for name in ("accuracy", "low", "high")]
    return Curve(label, [one[axis] for one in points], *parts)


def _by_stratum(results: Mapping[str, Any]) -> Html:
    """The strata of the last measured task: the longest or fullest. Two values are a table, more a figure."""
    standings = results["standings"]
    last = whole(standings[0])[-1]["evaluation"]
    content = []
    for name, meaning in STRATA.items():
        found = [[m for m in one["accuracy"] if m["stratum"] == name and m["evaluation"] == last] for one in standings]
        if not found[0]:
            continue
        if len(found[0]) <= 2:
            rows = [(one["label"], *map(percent, measured)) for one, measured in zip(standings, found, strict=True)]
            columns = ["mixer", *(f"{meaning}: {'yes' if m['value'] else 'no'}" for m in found[0])]
            content.append(table(columns, rows, note=f"Accuracy in %, at {last}."))
        else:
            plot = curves(
                [_curve(one["label"], measured, "value") for one, measured in zip(standings, found, strict=True)],
                x_label=meaning,
                y_label="accuracy (%)",
                description=f"Accuracy by {name}, one line per mixer.",
                log_x=name != "depth",
                markers=True,
                size=WIDE,
            )
            content.append(figure(plot, f"At {last}."))
    return section("What is easy and what is hard", *content)


def _training(results: Mapping[str, Any]) -> Html:
    standings, rows = results["standings"], results["rows"]
    plot = curves(
        [Curve(one["label"], [p[0] for p in one["training"]], [100 * p[2] for p in one["training"]]) for one in standings],
        x_label="steps",
        y_label="accuracy in training (%)",
        description="Accuracy in training by step, one line per mixer.",
        size=WIDE,
    )
    note = f"Seed {standings[0]['seeds'][0]} at each mixer's best learning rate. Examples are fresh, so this is accuracy on unseen ones."
    content = [figure(plot, note)]
    rates = sorted({row["learning_rate"] for row in rows})
    if len(rates) > 1:
        grid = []
        for one in standings:
            by_rate = [[row["train_accuracy"] for row in rows if (row["label"], row["learning_rate"]) == (one["label"], r)] for r in rates]
            grid.append((one["label"], *(f"{100 * sum(found) / len(found):.1f}" for found in by_rate)))
        content.append(table(["mixer", *(f"{rate:.2g}" for rate in rates)], grid, note="Accuracy in training (%) by learning rate."))
    return section("Training", *content)


def _sources(results: Mapping[str, Any]) -> Html:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [(name, results[name]) for name in ("command", "commit", "device")] + [("versions", versions), ("time", results["time"])]
    columns = ["mixer", "learning rate", "seed", "steps", "accuracy in training", "training", "ended", "run", "commit", "finished"]
    rows = [
        (
            row["label"],
            f"{row['learning_rate']:.2g}",
            row["seed"],
            f"{row['steps']:,}",
            f"{100 * row['train_accuracy']:.2f} %",
            f"{row['seconds']:.0f} s",
            "solved" if row["reached"] else "diverged" if row["diverged"] else "all steps",
            tag("code", row["run"]),
            row["commit"],
            row["time"],
        )
        for row in results["rows"]
    ]
    commands = {row["command"] for row in results["rows"]} - {results["command"]}
    earlier = [tag("p", "Some rows were made by earlier commands:"), *(tag("pre", c) for c in sorted(commands))] if commands else []
    return section("Where it comes from", fields(facts), *earlier, folded("Every run", table(columns, rows)))
