"""Results made readable: tables, plots, and one HTML file that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.report import comparison, efficiency, evaluation, microscope, rows, tasks
from fastweights.report.html import Html, page

Results = Mapping[str, Any]
SECTIONS: dict[str, Callable[[Results], Sequence[Html]]] = {"comparison": comparison.sections, "task comparison": tasks.sections}
"""What shows results of a kind, each by itself; a new kind is a new line here."""
TOGETHER: dict[str, Callable[[Sequence[Results]], Sequence[Html]]] = {
    "efficiency": efficiency.sections,
    "evaluation": evaluation.sections,
    "microscope": microscope.sections,
    "rows": rows.sections,
}
"""What shows all results of a kind side by side."""


def write_report(results: Sequence[Results], path: Path, *, title: str = "fastweights report") -> None:
    """One self-contained page of any set of results, each shown by its kind.

    Raises:
        ValueError: a kind that nothing shows.
    """
    by_kind: dict[Any, list[Results]] = {}
    for result in results:
        kind = result.get("kind")
        if kind not in SECTIONS and kind not in TOGETHER:
            raise ValueError(f"results of kind {kind!r} cannot be shown; known: {', '.join([*SECTIONS, *TOGETHER])}")
        by_kind.setdefault(kind, []).append(result)
    parts: list[Html] = []
    for kind, found in by_kind.items():
        parts += TOGETHER[kind](found) if kind in TOGETHER else [part for result in found for part in SECTIONS[kind](result)]
    lead = "Every number comes from a recorded row; the commands and versions that made it are at the end of its part."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, lead, *parts), encoding="utf-8")
