"""The tables of docs/efficiency.md from recorded rows: ``python benchmarks/efficiency_table.py`` writes them between the markers.

``cat runs/bench/*/*/results.jsonl > benchmarks/results/efficiency-cpu.jsonl`` first, to record new runs. Rates and exponents are of the
time for which the process had a processor: the machine did other work too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import growth
from fastweights.recipes.bench_results import joined
from fastweights.records import read_rows
from fastweights.report.efficiency import by_length, number, size

ROOT = Path(__file__).resolve().parent.parent
PAGE, ROWS = ROOT / "docs" / "efficiency.md", ROOT / "benchmarks" / "results" / "efficiency-cpu.jsonl"
MARKED = re.compile(r"(?<=<!-- recorded rows -->\n).*?(?=<!-- end of recorded rows -->)", flags=re.S)
PATH = {"prefill": "prompt", "decode": "rows"}
"""Of decoding, the engine's step alone."""
Row = dict[str, Any]


def tables(rows: Iterable[Row]) -> str:
    """Markdown: reading, decoding, and where both come from."""
    rows = [row for row in rows if "failed" not in row]
    shown = {one["what"]: [row for row in one["rows"] if row["path"] == PATH[one["what"]]] for one in joined(rows)}
    return "\n".join([_table("prefill", shown["prefill"]), _table("decode", shown["decode"]), _source(rows), ""])


def _table(what: str, rows: Sequence[Row]) -> str:
    key = ("label",) if what == "prefill" else ("label", "batch")
    lines_of: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        lines_of.setdefault(tuple(str(row[name]) for name in key), []).append(row)
    columns, lines = by_length(rows, lambda row: number(1e3 * row["length" if what == "prefill" else "batch"] / row["cpu_ms"]), key)
    head = ["mixer", *key[1:], *columns, "time grows with exponent", "state"]
    text = [f"Tokens a second {'of reading a prompt' if what == 'prefill' else 'of decoding after a context'}, by its length:", ""]
    text += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in lines:
        found = lines_of[tuple(line[: len(key)])]
        fit = growth(*zip(*[(float(row["length"]), ms) for row in found for ms in row["runs_cpu_ms"]], strict=True))
        error = "" if fit.error is None else f" ± {fit.error:.2f}"
        text.append(f"| {' | '.join(line)} | {round(fit.exponent, 2) + 0.0:.2f}{error} | {size(found[-1]['state_bytes'])} |")
    return "\n".join([*text, ""])


def _source(rows: Sequence[Row]) -> str:
    runs = sorted({len(row["runs_ms"]) for row in rows})
    often = f"Medians of {runs[0]} to {runs[-1]} runs" if runs[1:] else f"Medians of {runs[0]} runs" if runs[0] > 1 else "One run each"
    loads = [row["load"] for row in rows]
    models = dict.fromkeys(f"{row['label']} {row['parameters'] / 1e6:.2f} M" for row in rows)
    return (
        f"{', '.join(sorted({row['device'] for row in rows}))}; {', '.join(sorted({row['precision'] for row in rows}))}; at"
        f" {', '.join(sorted({row['commit'] for row in rows}))}. Parameters: {', '.join(models)}. {often}, on a machine of two cores"
        f" whose load was {min(loads):g} to {max(loads):g}."
    )


if __name__ == "__main__":
    PAGE.write_text(MARKED.sub(lambda _: tables(read_rows(ROWS)), PAGE.read_text()))
