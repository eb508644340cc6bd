"""The ablations of the Kaczmarz Linear Attention paper: on the field's recall benchmark, and in the training of a small language model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.task_job import state_floats
from fastweights.recipes.task_rows import ORIGIN, kept_rows, mean_accuracy, standings_table
from fastweights.recipes.task_standings import standings
from fastweights.records import read_rows
from fastweights.report.plots import bars

QUESTION = "Which parts of KLA does recall need (MQAR, d 128), and which its stability in training (language, 5 M parameters)?"
RULES = {
    "kla": "kla",
    "no-relaxation": "kla:relaxation=false",
    "no-key-norm": "kla:key_norm=none",
    "single-gate": "kla:single_gate=true",
    "over-t": "kla:sequence_factor=1/t",
    "over-sqrt-t": "kla:sequence_factor=1/sqrt(t)",
    "over-log-t": "kla:sequence_factor=1/log(1+t)",
    "learned-key-norm": "kla:key_norm=learned",
    "eta-max-2": "kla:eta_max=2",
    "one-over-t": "kla:relaxation=false:sequence_factor=1/t",
    "one-over-t-no-key-norm": "kla:relaxation=false:key_norm=none:sequence_factor=1/t",
    "no-relaxation-no-q-norm": "kla:relaxation=false:q_norm=none",
}
STATES = {f"expand-v-{factor}": f"kla:expand_v={factor}" for factor in (2, 4, 8, 16)}
ROWS = RULES | STATES
"""By the name of a row, what is trained. Queries are normalised in all but the last of the rules."""
NAMES = {mixer: name for name, mixer in ROWS.items()}
RATES = {"recall": (1e-3, 10**-2.5), "language": (4e-3, 1.6e-2)}
RECALL = (
    f"compare --task mqar-zoology-128 --steps 6000 --learning-rates {' '.join(map(repr, RATES['recall']))} --seeds 0 "
    "--precision bf16 --minutes 25"
)
SIDES = {"rules": (RULES, "--more-seeds 1 --at-once 12"), "states": (STATES, "--at-once 8")}
"""The two calls on the task: what is trained, and with what beside `RECALL`."""
STEPS, SETTLED = 400, 40
"""Of a training on text, and of those the first that its numbers on stability leave out: the warm-up and as many again."""
LANGUAGE = (
    "train --preset kla-5m --data $FASTWEIGHTS_DATA/corpus/english/train.parquet:0.8 $FASTWEIGHTS_DATA/corpus/python/train.parquet:0.2 "
    "--validation $FASTWEIGHTS_DATA/corpus/english/validation.parquet $FASTWEIGHTS_DATA/corpus/python/validation.parquet "
    f"--sequence-length 2048 --batch-tokens 32768 --steps {STEPS} --log-every 5 --save-every 200 "
    "--keep-checkpoints 1 --precision bf16 --validation-tokens 262144 --longest 1 --length-tokens 2048 --sample-tokens 0 --no-tensorboard"
)
LANES = 6
"""Trainings that share the card: most of the time of one goes by in its process, before the card has something to do."""
Row = dict[str, Any]


def run(lab: Any) -> None:
    _recall(lab, "rules")
    chains = []
    for name, mixer in ROWS.items():
        for rate in RATES["language"]:
            if not _stopped(lab.folder / _of_text(name, rate)):
                chains.append([(_of_text(name, rate), f"{LANGUAGE} --mixer {mixer} --learning-rate {rate:g}")])
    failed = [name for name in lab.together(chains, LANES) if not _stopped(lab.folder / name)]
    _recall(lab, "states")
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)}")


def _recall(lab: Any, side: str) -> None:
    mixers, more = SIDES[side]
    lab.fastweights(side, f"{RECALL} --mixers {' '.join(mixers.values())} {more}")


def _of_text(name: str, rate: float) -> str:
    """The folder of a training on text."""
    return f"text-{name}-{rate:g}"


def _stopped(folder: Path) -> str:
    """Which number that is not finite stopped a training; empty if none did."""
    file = folder / "run.json"
    return json.loads(file.read_text())["sessions"][-1].get("stopped", "") if file.exists() else ""


def rows(folder: Path) -> list[Row]:
    order = list(ROWS.values())
    kept = [row for side in SIDES for row in kept_rows(folder / side, kind="recall")]
    kept.sort(key=lambda row: (order.index(row["label"]), row["learning_rate"], row["seed"]))
    places = [(mixer, folder / _of_text(name, rate)) for name, mixer in ROWS.items() for rate in RATES["language"]]
    return kept + [_of_training(mixer, place) for mixer, place in places if (place / "result.json").exists() or _stopped(place)]


def _of_training(label: str, folder: Path) -> Row:
    """A training on text that came to its end, or to a number that is not finite."""
    run, stopped = json.loads((folder / "run.json").read_text()), _stopped(folder)
    curve = [[row["step"], round(row["loss"], 5), round(row["grad_norm"], 5)] for row in read_rows(folder / "metrics.jsonl")]
    row = {
        "kind": "language",
        "label": label,
        "learning_rate": run["settings"]["train.learning_rate"],
        "parameters": run["parameters"],
        "state_floats": _state_floats(run["config"]),
        "training": curve,
        "diverged": re.split(r"[;.] ", stopped)[0] if stopped else None,
        "bits_per_byte": None,
        "n": 0,
    } | {name: run["sessions"][-1][name] for name in ORIGIN}
    if not stopped:
        validation = json.loads((folder / "result.json").read_text())["validation"]
        row |= {"bits_per_byte": validation["bits_per_byte"], "n": validation["tokens"]}
    return row


def _state_floats(config: dict[str, Any]) -> int | None:
    with torch.device("meta"):
        return state_floats(FastWeightsForCausalLM(FastWeightsConfig(**config)))


def _standings(rows: list[Row]) -> list[Row]:
    return standings([row for row in rows if row["kind"] == "recall"])


def _language(rows: list[Row]) -> dict[str, dict[float, Row]]:
    """By the name of a row, its trainings on text by rate."""
    found: dict[str, dict[float, Row]] = {}
    for row in rows:
        if row["kind"] == "language":
            found.setdefault(NAMES[row["label"]], {})[row["learning_rate"]] = row
    return found


def answer(rows: list[Row]) -> str:
    parts = []
    if means := [(NAMES[one["label"]], mean_accuracy(one)) for one in _standings(rows)]:
        (name, first), *others = means  # kla's, if it has been run
        parts.append(f"mean accuracy of {name} {first:.1f} %")
        parts += [f"in points against that {', '.join(f'{name} {mean - first:+.1f}' for name, mean in others)}"] if others else []
    language = _language(rows)
    if language:
        ended = [f"{name} at {rate:g}" for name, runs in language.items() for rate, row in runs.items() if row["diverged"]]
        parts.append(f"on text {', '.join(ended) or 'none'} ended in a number that is not finite")
    return "; ".join(parts)


def table(rows: list[Row]) -> str:
    recall = [row for row in rows if row["kind"] == "recall"]
    ended = [f"{NAMES[row['label']]} at {row['learning_rate']:.2g}" for row in recall if row["diverged"]]
    note = (
        "Accuracy in %, by length and pairs; in brackets the worst and the best seed, or with one seed the 95 % interval. "
        f"{len(recall)} runs; in a loss that is not finite ended: {', '.join(ended) or 'none'}. Chance 0.02 %."
    )
    return "\n".join([*standings_table("MQAR, d 128", _standings(rows), mean=True, names=NAMES), "", note, "", *_language_table(rows), ""])


def _language_table(rows: list[Row]) -> list[str]:
    names = ["text, 5 M", "parameters", "state, floats"]
    for rate in RATES["language"]:
        names += [f"bits per byte at {rate:g}", "gradient", "rise"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for name, runs in _language(rows).items():
        one = next(iter(runs.values()))
        cells = [name, f"{one['parameters']:,}", f"{one['state_floats']:,}"]
        for rate in RATES["language"]:
            cells += _of_run(runs[rate]) if rate in runs else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Bits per byte on validation text at 2,048 bytes of context; median and largest norm of the gradient before clipping; how far "
        f"the loss rose above its lowest so far, in nats. The last two are of every fifth step from {SETTLED} on. One seed."
    )
    return [*lines, "", note]


def _of_run(row: Row) -> list[str]:
    late = [point for point in row["training"] if point[0] >= SETTLED]
    bits = f"not finite at {row['diverged'].partition(':')[0]}" if row["diverged"] else f"{row['bits_per_byte']['value']:.4f}"
    if not late:
        return [bits, "", ""]
    norms, lowest, rise = [norm for *_, norm in late], late[0][1], 0.0
    for _, loss, _ in late:
        rise, lowest = max(rise, loss - lowest), min(lowest, loss)
    return [bits, f"{median(norms):.2g}, {max(norms):.2g}", f"{rise:.2f}"]


def figure(rows: list[Row]) -> str:
    found = _standings(rows)
    return str(
        bars(
            [NAMES[one["label"]] for one in found],
            [mean_accuracy(one) for one in found],
            x_label="mean accuracy on MQAR, d 128, %",
            description="Mean accuracy on MQAR, a bar a row of the ablations.",
        )
    )
