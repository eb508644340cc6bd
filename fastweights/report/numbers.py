"""How numbers are written, the same in the terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def interval(estimate: Mapping[str, float | None], *, signed: bool = False) -> str:
    """`2.345 ± 0.012`: a value and half of its 95 % interval; the value alone where there is none."""
    value = f"{estimate['value']:+.3f}" if signed else f"{estimate['value']:.3f}"
    if estimate["low"] is None or estimate["high"] is None:
        return value
    return f"{value} ± {(estimate['high'] - estimate['low']) / 2:.3f}"


def percent(measured: Mapping[str, Any]) -> str:
    """`98.3 [97.1, 99.0]`: an accuracy in percent and the interval around it."""
    return f"{100 * measured['accuracy']:.1f} [{100 * measured['low']:.1f}, {100 * measured['high']:.1f}]"
