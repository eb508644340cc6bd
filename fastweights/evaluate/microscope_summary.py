"""What a microscope saw, short enough for a table, a picture and a JSON file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastweights.evaluate.microscope import LayerView, View

BINS = 128
"""Columns of a heat map over the text, at most."""
GROUPS = 12
"""Points of a curve against ‖k‖: as many tokens in each."""
AGAINST_KEY_NORM = ("corrected", "residual_share")


def summarise_view(view: View) -> dict[str, Any]:
    """Plain numbers of six digits.

    ``begins`` are the tokens at which the columns of the maps begin, ``looks`` those after which the states were looked at. Each of
    ``layers`` has ``tokens`` (name to mean, p10, p50, p90 over tokens and heads, and ``heads``, the means), ``maps`` (name to ``[heads,
    columns]``, means), ``by_key_norm`` (x, mean, low, high against ‖k‖; low and high are the 10th and 90th percentile), ``states``
    (name to ``[looks, heads]``; ``sigma_top`` to ``[heads, top]`` after the last chunk) and ``needle``.
    """
    rows = len(view.positions)
    cuts = np.unique(np.linspace(0, rows, min(BINS, rows) + 1).round().astype(int))
    layers = [_layer(layer, cuts) for layer in view.layers]
    return {"begins": view.positions[cuts[:-1]].tolist(), "looks": view.looks.tolist(), "layers": layers}


def _layer(layer: LayerView, cuts: NDArray[np.int64]) -> dict[str, Any]:
    groups = {name: _against(layer, name) for name in AGAINST_KEY_NORM if name in layer.tokens}
    states = {name: x[-1] if name == "sigma_top" else x for name, x in layer.states.items()}
    return {
        **{name: getattr(layer, name) for name in ("layer", "mixer", "key_heads", "value_heads")},
        "tokens": {name: _spread(x) for name, x in layer.tokens.items()},
        "maps": {name: digits(np.add.reduceat(x, cuts[:-1]).T / np.diff(cuts)) for name, x in layer.tokens.items()},
        "by_key_norm": groups,
        "states": {name: digits(x) for name, x in states.items()},
        "needle": layer.needle,
    }


def _spread(x: NDArray[np.float64]) -> dict[str, Any]:
    low, middle, high = np.percentile(x, [10, 50, 90])
    return {"mean": digits(x.mean()), "p10": digits(low), "p50": digits(middle), "p90": digits(high), "heads": digits(x.mean(0))}


def _against(layer: LayerView, name: str) -> dict[str, Any]:
    """A quantity of every token and value head in groups of equal size by the norm of its key."""
    norms = np.repeat(layer.tokens["key_norm"], layer.value_heads // layer.key_heads, axis=1).ravel()
    values, order = layer.tokens[name].ravel(), np.argsort(norms, kind="stable")
    groups = np.array_split(order, min(GROUPS, len(order)))
    return {
        "x": digits([norms[group].mean() for group in groups]),
        "mean": digits([values[group].mean() for group in groups]),
        "low": digits([np.percentile(values[group], 10) for group in groups]),
        "high": digits([np.percentile(values[group], 90) for group in groups]),
    }


def digits(x: Any) -> Any:
    """A number or an array as plain floats of six significant digits."""
    if isinstance(x, (list, np.ndarray)):
        return [digits(part) for part in x]
    return float(f"{x:.6g}")
