"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fastweights.report.numbers import interval


def comparison_table(results: Mapping[str, Any]) -> Table:
    """The summary of a comparison, a row per mixer."""
    entries = results["summary"]
    first, last = entries[0]["lengths"][0]["length"], entries[0]["lengths"][-1]["length"]
    table = Table(title="Bits per byte on validation text (lower is better), ± half of the 95 % interval", title_justify="left")
    table.add_column("mixer")
    for column in ("parameters", f"context {first}", f"difference to {entries[0]['label']}", f"context {last}", "tokens/s"):
        table.add_column(column, justify="right")
    for entry in entries:
        validation = entry["validation"]
        table.add_row(
            entry["label"] if len(results["settings"]["sizes"]) == 1 else f"{entry['label']} {entry['size']}",
            f"{entry['parameters']:,}",
            interval(validation["bits_per_byte"]),
            interval(validation["difference"], signed=True) if validation["difference"] else "",
            interval(entry["lengths"][-1]["bits_per_byte"]),
            f"{entry['tokens_per_second']:,.0f}",
        )
    return table
