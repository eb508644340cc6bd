"""Results made readable: tables, plots, and one HTML file that holds them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.report import comparison, tasks
from fastweights.report.html import Html, page

Results = Mapping[str, Any]
SECTIONS: dict[str, Callable[[Results], Sequence[Html]]] = {"comparison": comparison.sections, "task comparison": tasks.sections}
"""What shows results of a kind; a new kind is a new line here."""


def write_report(results: Sequence[Results], path: Path, *, title: str = "fastweights report") -> None:
    """One self-contained page of any set of results, each shown by its kind.

    Raises:
        ValueError: a kind that nothing shows.
    """
    for result in results:
        if result.get("kind") not in SECTIONS:
            raise ValueError(f"results of kind {result.get('kind')!r} cannot be shown; known: {', '.join(SECTIONS)}")
    parts = [part for result in results for part in SECTIONS[result["kind"]](result)]
    lead = "Every number comes from a recorded row; the commands and versions that made it are at the end of its part."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(title, lead, *parts), encoding="utf-8")
