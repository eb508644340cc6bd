"""Curves with confidence bands, bars and heat maps, as SVG that goes straight into a page, and as files where those are asked for."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastweights.report.html import Html, escape

if TYPE_CHECKING:  # matplotlib takes a second to import: it is imported where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
SIZE = re.compile(r' (width|height)="([\d.]+)pt"')
"""Of a figure, in its first tag."""


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
    integers: bool = False,
    y_range: Sequence[Any] = (),
    marks: Sequence[tuple[float, str]] = (),
    size: tuple[float, float] = (5.4, 3.7),
) -> Html:
    """A figure of lines. The same place in `lines` has the same colour in every figure.

    Args:
        description: what a reader who cannot see it is told.
        log_x: octaves on the x axis.
        zero: draw y = 0, for differences.
        integers: x is whole numbers, each with a tick where there is room.
        y_range: what the y axis must hold at least, so that figures beside each other can be compared.
        marks: (x, text) of vertical lines.
    """
    from matplotlib import ticker

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
            axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=14))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        elif integers:
            places = sorted({x for line in lines for x in line.x})
            axes.set_xticks(places[:: -(-len(places) // 12)])
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: short_number(float(x))))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
        if y_range:
            axes.update_datalim([(lines[0].x[0], y) for y in y_range])
            axes.autoscale_view()
        for x, text in marks:
            axes.axvline(x, color="#8c959f", lw=1, ls=(0, (3, 3)), zorder=1)
            place = dict(xycoords=("data", "axes fraction"), xytext=(4, -2), textcoords="offset points", va="top")
            axes.annotate(text, (x, 1), **place, color="#59636e", fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(lines) > 1:
            _legend(axes, [line.label for line in lines])
        return finish()


def _legend(axes: Axes, labels: Sequence[str]) -> None:
    """Above the axes, in a figure made higher for it: inside, it would hide a line or a band."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int((width - 0.6) / (0.55 + 0.09 * max(map(len, labels))))))
    figure.set_size_inches(width, height + 0.21 * -(-len(labels) // columns))
    figure.legend(loc="outside upper left", ncols=columns)


class Heat(NamedTuple):
    """A heat map's numbers and what stands beside it."""

    values: Sequence[Sequence[float | None]]
    """``[rows][columns]``; None is left white."""
    groups: Sequence[tuple[str, int]]
    """Names of consecutive rows, and how many rows each name is for."""
    limits: tuple[float, float]
    """The values of the ends of the colours."""
    centre: float | None = None
    """Two colours that meet here, where this lies between the limits; None: one scale."""


def heat_map(
    heat: Heat,
    *,
    x_label: str,
    value_label: str,
    description: str,
    extent: tuple[float, float] | None = None,
    columns: Sequence[str] = (),
    texts: Sequence[Sequence[str]] = (),
    y_label: str = "",
    size: tuple[float, float] | None = None,
) -> Html:
    """A grid of colours.

    Args:
        extent: x at the left and the right edge; else `columns` name the columns.
        texts: what is written in each cell ``[rows][columns]``.
        size: inches; by default as high as the rows need.
    """
    from matplotlib import colors, ticker

    rows = len(heat.values)
    with _figure(size or (5.4, min(6.5, max(1.9, 1.2 + 0.16 * rows))), description) as (axes, finish):
        low, high = heat.limits if heat.limits[0] < heat.limits[1] else (heat.limits[0], heat.limits[0] + 1e-6)
        two = heat.centre is not None and low < heat.centre < high
        norm = colors.TwoSlopeNorm(heat.centre, low, high) if two and heat.centre is not None else colors.Normalize(low, high)
        left, right = extent or (0.0, float(len(columns)))
        values = np.array(heat.values, dtype=float)
        colours = "PuOr_r" if two else "viridis"
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", norm=norm, cmap=colours, extent=(left, right, rows, 0), rasterized=True
        )
        axes.grid(False)
        axes.tick_params(length=0)
        ends = np.cumsum([count for _, count in heat.groups])
        every = -(-len(ends) // 16)  # names that would overlap are left out
        middles = [end - count / 2 for end, (_, count) in zip(ends, heat.groups, strict=True)]
        axes.set_yticks(middles[::every], [name for name, _ in heat.groups][::every])
        for end in ends[:-1]:
            axes.axhline(end, color="white", lw=1.2)
        if columns:
            axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
        else:
            axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
        for row, line in enumerate(texts):
            for column, text in enumerate(line):
                red, green, blue, _ = image.cmap(norm(values[row, column]))
                ink = "#1c2128" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
        bar.set_label(value_label)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(length=0)
        return finish()


def bars(names: Sequence[str], values: Sequence[float], *, x_label: str, description: str, marks: Sequence[float | None] = ()) -> Html:
    """Horizontal bars, the first on top, each with its number; `marks` are floors or aims, a short line across each bar."""
    with _figure((11.2, 0.9 + 0.34 * len(names)), description) as (axes, finish):
        places = np.arange(len(names))
        axes.barh(places, values, color=COLOURS[0], height=0.62, zorder=3)
        for place, mark in zip(places, marks, strict=False):
            if mark is not None:
                axes.plot([mark, mark], [place - 0.4, place + 0.4], color=COLOURS[1], lw=2, zorder=4)
        axes.set_yticks(places, [f"{name}   {value:.4g}" for name, value in zip(names, values, strict=True)])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.margins(x=0.08)
        axes.set_xlabel(x_label)
        return finish()


def beside(figures: Sequence[Html], *, description: str) -> Html:
    """Figures side by side as one, for a file that holds one."""
    parts, left, highest = [], 0.0, 0.0
    for figure in figures:
        width, height = (float(points) for _, points in SIZE.findall(figure)[:2])
        parts.append(SIZE.sub(r' \1="\2"', figure, count=2).replace("<svg", f'<svg x="{left:g}"', 1))
        left, highest = left + width, max(highest, height)
    size = f'width="{left:g}pt" height="{highest:g}pt" viewBox="0 0 {left:g} {highest:g}"'
    head = f'<svg role="img" aria-label="{escape(description)}" xmlns="http://www.w3.org/2000/svg" {size}>'
    return Html("\n".join([head, *parts, "</svg>"]))


class _Export(NamedTuple):
    folder: Path
    formats: Sequence[str]
    written: list[Path]


_export: ContextVar[_Export | None] = ContextVar("export", default=None)


@contextmanager
def exporting(folder: Path, formats: Sequence[str]) -> Iterator[list[Path]]:
    """Every figure that is drawn inside is also written to a file of each format (``svg``, ``png``); yields the paths as they come.

    Raises:
        ValueError: another format.
    """
    for name in formats:
        if name not in ("svg", "png"):
            raise ValueError(f"figures can be written as svg or png, not {name!r}")
    export = _Export(folder, formats, [])
    folder.mkdir(parents=True, exist_ok=True)
    token = _export.set(export)
    try:
        yield export.written
    finally:
        _export.reset(token)


@contextmanager
def _figure(size: tuple[float, float], description: str):
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")  # not pyplot's: no window, no global state
        axes: Axes = figure.add_subplot()

        def finish() -> Html:
            text, nobody = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=nobody, dpi=150)
            svg = text.getvalue()
            if (export := _export.get()) is not None:
                _write(figure, svg, description, export)
            svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)
            return Html(svg)

        yield axes, finish


def _write(figure: Figure, svg: str, description: str, export: _Export) -> None:
    words = re.sub(r"[^a-z0-9]+", "-", description.lower()).strip("-")[:60]
    number = 1 + len(export.written) // len(export.formats)
    for name in export.formats:
        path = export.folder / f"{number:02}-{words}.{name}"
        if name == "svg":
            path.write_text(svg, encoding="utf-8")
        else:
            figure.savefig(path, format="png", dpi=200, facecolor="white")
        export.written.append(path)


def short_number(x: float) -> str:
    """1024 as 1K, 3000000 as 3M; what does not shorten stays."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if x >= size and x % size == 0:
            return f"{x / size:g}{unit}"
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if x >= size and (100 * x / size) % 1 == 0:
            return f"{x / size:g}{unit}"
    return f"{x:g}"
