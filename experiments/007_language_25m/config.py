"""Language at 25 M parameters: each mixer's rate from short runs, then 60 M tokens each, with two seeds for the pairs that matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastweights.evaluate.statistics import ratio_estimate
from fastweights.recipes.compare import equal_parameters
from fastweights.recipes.settings import Variant
from fastweights.records import read_rows
from fastweights.report.plots import Curve, curves
from fastweights.train.presets import ModelSize

QUESTION = "Which mixer models language best at 25 M parameters and 60 M tokens, and does CCQ help?"
PAIRS = ("gdn", "kla", "gdn+ccq", "kla+ccq")
MIXERS = {
    "gdn": "gated_deltanet",
    "kla": "kla",
    "gdn+ccq": "gated_deltanet+ccq:ccq_unit_keys=false",
    "kla+ccq": "kla+ccq",
    "gdn+ccq-learned": "gated_deltanet+ccq:ccq_unit_keys=false:ccq_strength=learned",
    "kla+ccq-learned": "kla+ccq:ccq_strength=learned",
    "gdn+projection": "gated_deltanet+projection",
    "gla": "gla",
    "gla+ccq": "gla+ccq:ccq_unit_keys=false",
    "gla+ccq-learned": "gla+ccq:ccq_unit_keys=false:ccq_strength=learned",
    "transformer": "softmax",
    "mamba2": "mamba2",
}
RUNS = [(label, seed) for seed in (0, 1) for label in PAIRS] + [(label, 0) for label in MIXERS if label not in PAIRS]
"""The most decisive first."""
RATE_OF = {"gdn+ccq-learned": "gdn+ccq", "kla+ccq-learned": "kla+ccq", "gla+ccq-learned": "gla+ccq", "gdn+projection": "gdn"}
"""These have the rate that was found for another, from which a number or a vector a head tells them apart."""
BESIDE = {
    "kla": "gdn",
    "gdn+ccq": "gdn",
    "kla+ccq": "kla",
    "gla+ccq": "gla",
    "gdn+projection": "gdn",
    "transformer": "gdn",
    "mamba2": "gdn",
}
BESIDE |= {"gla": "gdn", "gdn+ccq-learned": "gdn+ccq", "kla+ccq-learned": "kla+ccq", "gla+ccq-learned": "gla+ccq"}
"""Which run each is measured against, at the same seed: they read the same windows in the same order."""
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
RATES_OF: dict[str, tuple[float, ...]] = {}
"""Of mixers that are tried at other rates than RATES."""
SHAPE = ModelSize(hidden_size=384, num_hidden_layers=6, num_heads=6, intermediate_size=1024)
PIECES = 32_000
BATCH, STEPS, SHORT_STEPS = 16 * 4096, 916, 100
LANES = 8
"""Trainings that share the card: one alone leaves it waiting while it is loaded, compiled and measured."""
SETTING = (
    "train --data $FASTWEIGHTS_DATA/corpus/english/train.parquet:0.8 $FASTWEIGHTS_DATA/corpus/python/train.parquet:0.2 "
    "--validation $FASTWEIGHTS_DATA/corpus/english/validation.parquet $FASTWEIGHTS_DATA/corpus/python/validation.parquet "
    "--tokenizer $FASTWEIGHTS_DATA/tokenizer --sequence-length 4096 --log-every 20 --save-every 300 --keep-checkpoints 1 "
    "--validation-tokens 524288 --longest 1 --length-tokens 4096 --sample-tokens 0 --no-tensorboard"
)
PRECISION, COMPILE = "--precision bf16", "--compile"
"""Compiled but for the transformer, whose attention was compiled anew for every number of documents when this was written."""
TEXTS = {"books": "curve_english", "meetings": "curve_qmsum", "code": "curve_python"}
LENGTHS = tuple(1024 * 2**n for n in range(7))
NEEDLES = ("niah_single_1_1024", "niah_single_1_2048", "niah_single_1_4096", "niah_single_2_1024")
MEASURE = f"--tasks {' '.join(TEXTS.values())} lambada_openai --lengths {' '.join(map(str, LENGTHS))} --tokens 262144"
FIND = f"--tasks {' '.join(NEEDLES)} --limit 100"
ORIGIN = ("command", "commit", "device", "versions", "time", "seed")
Row = dict[str, Any]


def run(lab: Any) -> None:
    widths = _widths()
    # One that diverges gives no result, which says that its rate is too high.
    lab.together([[_training(_short(label, rate), widths, label, rate, SHORT_STEPS, 0)] for label, rate in _tried()], LANES)
    best = _best(_rates(lab.folder))
    chains = []
    for label, seed in RUNS:
        if label not in best:  # none of its rates came to an end
            continue
        name = _long(label, seed, best[label])
        chain = [_training(name, widths, label, best[label], STEPS, seed), (f"{name}-measured", _measuring(lab, name, MEASURE))]
        chains.append([*chain, (f"{name}-found", _measuring(lab, name, FIND))] if seed == 0 else chain)
    failed = lab.together(chains, LANES)
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)}")


def _widths() -> dict[str, int]:
    """Of each MLP, for equal parameters."""
    special = {"bos_token_id": 1, "eos_token_id": 1}
    found = equal_parameters([Variant.parse(mixer) for mixer in MIXERS.values()], SHAPE, PIECES, special)
    return {label: found[mixer][0]["intermediate_size"] for label, mixer in MIXERS.items()}


def _training(name: str, widths: dict[str, int], label: str, rate: float, steps: int, seed: int) -> tuple[str, str]:
    shape = f"--hidden-size {SHAPE.hidden_size} --num-hidden-layers {SHAPE.num_hidden_layers} --num-heads {SHAPE.num_heads}"
    shape = f"--mixer {MIXERS[label]} {shape} --intermediate-size {widths[label]}"
    how = PRECISION if label == "transformer" else f"{PRECISION} {COMPILE}"
    return name, f"{SETTING} {how} {shape} --batch-tokens {BATCH} --steps {steps} --learning-rate {rate:g} --seed {seed}"


def _measuring(lab: Any, name: str, tasks: str) -> str:
    return f"eval {lab.place(name)}/model --suite offline --data $FASTWEIGHTS_DATA --batch-size 64 {tasks}"


def _tried() -> list[tuple[str, float]]:
    """The rates that each mixer's own is chosen from."""
    return [(label, rate) for label in MIXERS if label not in RATE_OF for rate in RATES_OF.get(label, RATES)]


def _short(label: str, rate: float) -> str:
    return f"rate-{rate:g}-{label}"


def _long(label: str, seed: int, rate: float | None) -> str:
    """The rate is for experiments that have several whole trainings of a label and seed."""
    return f"{label}-seed{seed}"


def rows(folder: Path) -> list[Row]:
    kept = _rates(folder)
    best = _best(kept)
    for label, seed in RUNS:
        name = _long(label, seed, best.get(label))
        result = folder / name / "result.json"
        if result.exists():
            last = read_rows(result.parent / "metrics.jsonl")[-1]
            gates = {name: round(value, 5) for name, value in last.items() if "/" in name}
            found = json.loads(result.read_text())
            documents = [[round(bits, 1), round(size, 1)] for bits, size in found["validation"]["per_document"]]
            more = {"training": found["training"], "gates": gates, "documents": documents}
            kept.append(_of_training("language", label, result) | more | _measured(folder, name))
    return kept


def _rates(folder: Path) -> list[Row]:
    """The short runs that came to their end."""
    found = [(label, folder / _short(label, rate) / "result.json") for label, rate in _tried()]
    return [_of_training("rate", label, result) for label, result in found if result.exists()]


def _of_training(kind: str, label: str, result: Path) -> Row:
    row = json.loads(result.read_text())
    score = {"bits_per_byte": row["validation"]["bits_per_byte"], "n": row["validation"]["tokens"]}
    few = {name: row[name] for name in ("mixer", "parameters", "tokens", "seconds", *ORIGIN)}
    return {"kind": kind, "label": label, "learning_rate": row["settings"]["train.learning_rate"]} | few | score


def _measured(folder: Path, name: str) -> Row:
    """Of a trained model: bits per byte by text and length, and the main score of each task."""
    found: Row = {"curves": {}, "scores": {}}
    for part in ("measured", "found"):
        for row in read_rows(folder / f"{name}-{part}" / "results.jsonl"):
            if row["group"] == "curves":
                few = ("length", "bits_per_byte", "tail_bits_per_byte", "tokens", "documents")
                found["curves"][row["task"]] = [{name: point[name] for name in few} for point in row["points"]]
            else:
                found["scores"][row["task"]] = row["scores"][0] | {"samples": row["samples"]}
    return found


def _best(rows: list[Row]) -> dict[str, float]:
    """The rate of each: with the fewest bits on the validation text after a short run."""
    chosen = {label: min(bits, key=lambda rate: bits[rate]) for label, bits in _bits_by_rate(rows).items()}
    return chosen | {label: chosen[other] for label, other in RATE_OF.items() if other in chosen}


def _bits_by_rate(rows: list[Row]) -> dict[str, dict[float, float]]:
    """Of the short runs of each mixer."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["kind"] == "rate":
            found.setdefault(row["label"], {})[row["learning_rate"]] = row["bits_per_byte"]["value"]
    return found


def _runs(rows: list[Row]) -> dict[str, dict[int, Row]]:
    """Of each mixer, by seed, in the order of the mixers."""
    found: dict[str, dict[int, Row]] = {}
    for label in MIXERS:
        seeds = {row["seed"]: row for row in rows if row["kind"] == "language" and row["label"] == label}
        found |= {label: seeds} if seeds else {}
    return found


def _differences(rows: list[Row], label: str) -> list[str]:
    """In bits per byte on the validation text, to the run beside, by seed; with half of the 95 % interval over the same documents,
    and the rates where they differ."""
    runs = _runs(rows)
    mine, other = runs.get(label, {}), runs.get(BESIDE.get(label, ""), {})
    found = []
    for seed in sorted(mine.keys() & other.keys()):
        pairs = list(zip(mine[seed]["documents"], other[seed]["documents"], strict=True))
        apart = ratio_estimate([a - b for (a, _), (b, _) in pairs], [size for (_, size), _ in pairs])
        rates = [runs[seed]["learning_rate"] for runs in (mine, other)]
        note = "" if rates[0] == rates[1] else f" (rates {rates[0]:g} and {rates[1]:g})"
        found.append(f"{apart.value:+.3f} ± {(apart.high - apart.low) / 2:.3f}{note}")
    return found


def answer(rows: list[Row]) -> str:
    if not _runs(rows):
        found = [f"{label} {min(bits.values()):.3f}" for label, bits in _bits_by_rate(rows).items()]
        return f"so far the short runs: bits per byte after {SHORT_STEPS} steps, each at the best of its rates: {', '.join(found)}"
    found = [(label, _differences(rows, label)) for label in MIXERS if label in BESIDE]
    parts = [f"{label} − {BESIDE[label]} {' and '.join(by_seed)}" for label, by_seed in found if by_seed]
    return f"bits per byte on held-out text, a number a seed, each at the rate that is best after {SHORT_STEPS} steps: {', '.join(parts)}"


def table(rows: list[Row]) -> str:
    return "\n".join([*(_main_table(rows) if _runs(rows) else []), "", *_rate_table(rows), ""])


def _main_table(rows: list[Row]) -> list[str]:
    ends = [f"{text} {length // 1024} K" for text in TEXTS for length in (LENGTHS[0], LENGTHS[2], LENGTHS[-1])]
    names = ["mixer", "parameters", "rate", "bits per byte", "difference to", *ends, "LAMBADA", *(_needle(name) for name in NEEDLES)]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for label, seeds in _runs(rows).items():
        first = seeds[min(seeds)]
        bits = " ".join(f"{row['bits_per_byte']['value']:.4f}" for row in seeds.values())
        apart = ", ".join(_differences(rows, label))
        cells = [label, f"{first['parameters']:,}", f"{first['learning_rate']:g}", bits, f"{BESIDE[label]} {apart}" if apart else ""]
        for task in TEXTS.values():
            at = {point["length"]: point["bits_per_byte"]["value"] for point in first["curves"].get(task, [])}
            cells += [f"{at[length]:.3f}" if length in at else "" for length in (LENGTHS[0], LENGTHS[2], LENGTHS[-1])]
        scores = [first["scores"].get(task) for task in ("lambada_openai", *NEEDLES)]
        cells += [f"{100 * score['value']:.1f}" if score else "" for score in scores]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Bits per byte on validation text at 4,096 tokens of context, a number a seed, and the difference of each, ± half of its 95 % "
        "interval over 81 documents; then seed 0: bits per byte by context, LAMBADA's last words and needles found, in %."
    )
    return [*lines, "", note]


def _needle(name: str) -> str:
    """`S-NIAH-1 4 K` of `niah_single_1_4096`."""
    _, _, variant, length = name.split("_")
    return f"S-NIAH-{variant} {int(length) // 1024} K"


def _rate_table(rows: list[Row]) -> list[str]:
    by_rate, best = _bits_by_rate(rows), _best(rows)
    rates = sorted({rate for bits in by_rate.values() for rate in bits})
    lines = [f"| bits per byte after {SHORT_STEPS} steps | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (1 + len(rates)) + "|"]
    for label in MIXERS:
        found = by_rate.get(label, {})
        cells = [f"{found[rate]:.4f}" if rate in found else "" for rate in rates]
        if found:
            cells[rates.index(best[label])] = f"**{cells[rates.index(best[label])]}**"
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def figure(rows: list[Row]) -> str:
    if not _runs(rows):
        lines = [Curve(label, sorted(bits), [bits[rate] for rate in sorted(bits)]) for label, bits in _bits_by_rate(rows).items()]
        names = {"x_label": "learning rate", "y_label": f"bits per byte after {SHORT_STEPS} steps"}
        return str(curves(lines, **names, log_x=True, markers=True, description="Bits per byte by learning rate, a line a mixer."))
    lines = []
    for label, seeds in _runs(rows).items():
        points = seeds[min(seeds)]["curves"].get(TEXTS["books"], [])
        if points:
            lines.append(Curve(label, [point["length"] for point in points], [point["bits_per_byte"]["value"] for point in points]))
    names = {"x_label": "tokens of context", "y_label": "bits per byte of books"}
    return str(curves(lines, **names, log_x=True, markers=True, description="Bits per byte of books by context, a line a mixer."))
