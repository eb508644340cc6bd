"""Curves with confidence bands, as SVG that goes straight into a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fastweights.report.html import Html, escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6f4e37", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart; strokes change where they run out."""
STROKES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": "#1c2128",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e8ec",
    "grid.linewidth": 0.8,
    "xtick.color": "#59636e",
    "ytick.color": "#59636e",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "fastweights",
}


class Curve(NamedTuple):
    """One line; `low` and `high` are its band, where there is one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def curves(
    lines: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    description: str,
    log_x: bool = False,
    markers: bool = False,
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    size: tuple[float, float] = (5.4, 3.7),
) -> Html:
    """A figure of lines. The same place in `lines` has the same colour in every figure.

    Args:
        description: what a reader who cannot see it is told.
        log_x: octaves on the x axis.
        zero: draw y = 0, for differences.
        marks: (x, text) of vertical lines.
    """
    with _figure(size, description) as (axes, finish):
        for i, line in enumerate(lines):
            colour, stroke = COLOURS[i % len(COLOURS)], STROKES[i // len(COLOURS) % len(STROKES)]
            axes.plot(line.x, line.y, stroke, color=colour, lw=1.8, marker="o" if markers else None, ms=4.5, label=line.label, zorder=3)
            band = [(x, a, b) for x, a, b in zip(line.x, line.low, line.high, strict=False) if a is not None and b is not None]
            if band:
                axes.fill_between(*zip(*band, strict=True), color=colour, alpha=0.12, lw=0, zorder=2)
        if zero:
            axes.axhline(0, color="#59636e", lw=1, zorder=1)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_locator(MaxNLocator(6))
        for x, text in marks:
            axes.axvline(x, color="#8c959f", lw=1, ls=(0, (3, 3)), zorder=1)
            place = dict(xycoords=("data", "axes fraction"), xytext=(4, -2), textcoords="offset points", va="top")
            axes.annotate(text, (x, 1), **place, color="#59636e", fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(lines) > 1:
            axes.legend(loc="best")
        return finish()


@contextmanager
def _figure(size: tuple[float, float], description: str):
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")  # not pyplot's: no window, no global state
        axes: Axes = figure.add_subplot()

        def finish() -> Html:
            text = io.StringIO()
            figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            svg = text.getvalue()
            svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
            return Html(svg)

        yield axes, finish


def short_number(x: float) -> str:
    """1024 as 1K, 3000000 as 3M; what does not shorten stays."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if x >= size and x % size == 0:
            return f"{x / size:g}{unit}"
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if x >= size and (10 * x / size) % 1 == 0:
            return f"{x / size:g}{unit}"
    return f"{x:g}"
