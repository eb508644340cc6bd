"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from fastweights.report.numbers import interval, percent
from fastweights.report.tasks import whole


def comparison_table(results: Mapping[str, Any]) -> Table:
    """The summary of a comparison, a row per mixer; four of usual names fit 80 columns."""
    entries = results["summary"]
    first, last = entries[0]["lengths"][0]["length"], entries[0]["lengths"][-1]["length"]
    table = Table(
        title="Bits per byte on validation text, ± half of the 95 % interval. Lower is better.",
        caption=f"difference: to {entries[0]['label']}, {'seed by seed' if len(entries[0]['seeds']) > 1 else 'document by document'}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("mixer")
    for column in (f"context {first}", "difference", f"context {last}", "tokens/s"):
        table.add_column(column, justify="right")
    for entry in entries:
        validation = entry["validation"]
        table.add_row(
            entry["label"] if len(results["settings"]["sizes"]) == 1 else f"{entry['label']} {entry['size']}",
            interval(validation["bits_per_byte"]),
            interval(validation["difference"], signed=True) if validation["difference"] else "",
            interval(entry["lengths"][-1]["bits_per_byte"]),
            f"{entry['tokens_per_second']:,.0f}",
        )
    return table


def task_table(results: Mapping[str, Any]) -> Table:
    """The standings of a comparison on a task, a row per mixer."""
    standings = results["standings"]
    spread = "the 95 % interval" if len(standings[0]["seeds"]) == 1 else "the worst and the best seed"
    table = Table(title=f"{results['preset']}: accuracy in %, with {spread}", title_justify="left")
    table.add_column("mixer", no_wrap=True)
    for column in (*(one["evaluation"] for one in whole(standings[0])), "learning rate", "steps"):
        table.add_column(column, justify="right")
    for one in standings:
        table.add_row(one["label"], *map(percent, whole(one)), f"{one['learning_rate']:.2g}", f"{one['steps']:,.0f}")
    return table
