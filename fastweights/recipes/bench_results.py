"""Rows of benchmarks joined to results: the newest of each case, and how times grow with the length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastweights.evaluate.statistics import growth

Row = dict[str, Any]


def joined(rows: Iterable[Row]) -> list[Row]:
    """Results of kind `efficiency`, without provenance: one of reading prompts, one of decoding, as far as there are rows."""
    newest = {row["run"]: row for row in rows}.values()
    by_what: dict[str, list[Row]] = {}
    for row in newest:
        by_what.setdefault(row["what"], []).append(row)
    return [{"kind": "efficiency", "what": what, "rows": found, "growth": growths(found)} for what, found in sorted(by_what.items())]


def growths(rows: Sequence[Row]) -> list[Row]:
    """For every model, path and batch: the exponent of the time of a prompt, or of one step, by the length, of all runs; and the change of
    the median from the shortest to the longest."""
    lines: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        if "failed" not in row:
            lines.setdefault((row["label"], row["path"], row["batch"], row["device"]), []).append(row)
    found = []
    for (label, path, batch, _), line in lines.items():
        line = sorted(line, key=lambda row: row["length"])
        lengths, change = [row["length"] for row in line], line[-1]["ms"] / line[0]["ms"] - 1
        if len(set(lengths)) > 1:
            runs = [(float(row["length"]), ms) for row in line for ms in row["runs_ms"]]
            fit = growth(*zip(*runs, strict=True))._asdict()
            found.append(
                {
                    "what": line[0]["what"],
                    "label": label,
                    "path": path,
                    "batch": batch,
                    "lengths": lengths,
                    "change": change,
                }
                | fit
            )
    return found
