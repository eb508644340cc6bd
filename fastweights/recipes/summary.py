"""Rows of single runs joined into one statement per mixer: what the terminal's table, results.json and the report all show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastweights.evaluate.statistics import Estimate, mean_estimate, ratio_estimate

Row = dict[str, Any]


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per (label, size), in order of appearance; differences are to the first label at the same size and the same seeds.

    With one seed, an interval is over documents, and that of a difference over the *same* documents: it says how sure the number is for
    these weights on other text, not for another training. With more seeds it is over the seeds.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["size"]), []).append(row)
    first = rows[0]["label"]
    return [_entry(group, None if label == first else groups.get((first, size))) for (label, size), group in groups.items()]


def _entry(group: list[Row], baseline: list[Row] | None) -> dict[str, Any]:
    first = group[0]
    pairs = _pairs(group, baseline)
    return {
        "label": first["label"],
        "size": first["size"],
        "parameters": first["parameters"],
        "seeds": [row["seed"] for row in group],
        "tokens": first["tokens"],
        "tokens_per_second": sum(row["tokens_per_second"] for row in group) / len(group),
        "validation": _score([row["validation"] for row in group], [(a["validation"], b["validation"]) for a, b in pairs]),
        "lengths": [
            {"length": point["length"]}
            | _score([row["lengths"][i] for row in group], [(a["lengths"][i], b["lengths"][i]) for a, b in pairs])
            for i, point in enumerate(first["lengths"])
        ],
        "positions": [
            {"begin": point["begin"], "end": point["end"]} | _joined([row["positions"][i]["bits_per_byte"] for row in group])._asdict()
            for i, point in enumerate(first["positions"])
        ],
        "training": [[tokens, sum(row["training"][i][1] for row in group) / len(group)] for i, (tokens, _) in enumerate(first["training"])],
        "sample": first["sample"],
    }


def _pairs(group: list[Row], baseline: list[Row] | None) -> list[tuple[Row, Row]]:
    """(run, baseline run) of the same seed."""
    by_seed = {row["seed"]: row for row in baseline or []}
    return [(row, by_seed[row["seed"]]) for row in group if row["seed"] in by_seed]


def _score(points: list[dict], pairs: list[tuple[dict, dict]]) -> dict[str, Any]:
    return {
        "bits_per_byte": _joined([point["bits_per_byte"] for point in points])._asdict(),
        "tail_bits_per_byte": _joined([point["tail_bits_per_byte"] for point in points])._asdict(),
        "perplexity": sum(point["perplexity"] for point in points) / len(points),
        "tokens": points[0]["tokens"],
        "documents": points[0]["documents"],
        "difference": _difference(pairs)._asdict() if pairs else None,
    }


def _joined(estimates: list[dict[str, Any]]) -> Estimate:
    """One seed: as it is. More: mean and interval over the seeds."""
    return Estimate(**estimates[0]) if len(estimates) == 1 else mean_estimate([estimate["value"] for estimate in estimates])


def _difference(pairs: list[tuple[dict, dict]]) -> Estimate:
    if len(pairs) > 1:
        return mean_estimate([a["bits_per_byte"]["value"] - b["bits_per_byte"]["value"] for a, b in pairs])
    (ours, theirs), *_ = pairs
    bits = [a - b for (a, _), (b, _) in zip(ours["per_document"], theirs["per_document"], strict=True)]
    return ratio_estimate(bits, [byte for _, byte in ours["per_document"]])
