import math

import pytest

from fastweights.evaluate.microscope import STATES, TOKENS, inspect_memory
from fastweights.evaluate.microscope_summary import summarise_view
from fastweights.evaluate.needle import Needle
from tests.models.tiny import tiny_model, tokens

PROVENANCE = {
    "command": "fastweights demo",
    "commit": "abc1234567",
    "device": "A processor, 2 threads",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "time": "2030-01-01T00:00:00+00:00",
}


@pytest.fixture
def results():
    """What `compare` writes for four mixers, with numbers that look like the real ones."""

    def estimate(value, half):
        return {"value": value, "low": value - half, "high": value + half}

    octaves = [16 * 2**i for i in range(8)]

    def entry(i, label):
        gain = -0.02 * i
        points = [
            {
                "length": 256 * 2**j,
                "bits_per_byte": estimate(2.4 - 0.05 * j + gain, 0.08),
                "tail_bits_per_byte": estimate(2.38 - 0.05 * j + gain, 0.09),
                "perplexity": 5.0,
                "tokens": 131072,
                "documents": 32,
                "difference": estimate(gain * (1 + j / 4), 0.01) if i else None,
            }
            for j in range(5)
        ]
        return {
            "label": label,
            "size": "0.3m",
            "parameters": 612_000 + i,
            "seeds": [0],
            "tokens": 2_457_600,
            "tokens_per_second": 21_000.0 - 1000 * i,
            "validation": points[0] | {"tokens": 262144, "documents": 60},
            "lengths": points,
            "positions": [{"begin": a, "end": 2 * a or 16} | estimate(3.4 - 0.1 * math.log2(a or 8) + gain, 0.1) for a in (0, *octaves)],
            "training": [[4096 * s, 2.2 + 6 * math.exp(-s / 60) + gain] for s in range(10, 601, 10)],
            "sample": {"prompt": "def <f>", "text": "(x):\n    return '<b>' & x\n"},
        }

    labels = ["gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq"]
    summary = [entry(i, label) for i, label in enumerate(labels)]
    rows = [e | PROVENANCE | {"seed": 0, "run": f"run{i}", "seconds": 61.5} for i, e in enumerate(summary)]
    settings = {
        "mixers": labels,
        "sizes": ["0.3m"],
        "change": {"hidden_size": None},
        "seeds": [0],
        "data": ["stdlib"],
        "validation": [],
        "train": {"steps": 600, "sequence_length": 256},
        "evaluate": {"prompt": ""},
    }
    text = {"train_tokens": 7_700_000, "validation_tokens": 1_000_000, "validation_documents": 70}
    return {"kind": "comparison", "settings": settings, "text": text, "summary": summary, "rows": rows, **PROVENANCE}


@pytest.fixture
def task_results():
    """What `compare --task` writes for three mixers and two learning rates."""

    def measured(length, accuracy, stratum=None, value=None):
        named = {
            "evaluation": f"length {length}, pairs 4",
            "task": "mqar",
            "length": length,
            "pairs": 4,
            "stratum": stratum,
            "value": value,
        }
        return named | {"chance": 0.01, "ceiling": 1.0, "accuracy": accuracy, "low": accuracy - 0.05, "high": min(1, accuracy + 0.03)}

    standings, rows = [], []
    for i, label in enumerate(("gated_deltanet", "kla", "kla+ccq")):
        curve = [[step, 5.0, min(1.0, step / (400 + 100 * i)), step / 50] for step in range(50, 1001, 50)]
        found = [measured(length, 0.99 - 0.1 * i * j) for j, length in enumerate((64, 128, 256))]
        found += [measured(256, 0.95 - 0.02 * j, "gap", 8 * 2**j) for j in range(5)]
        found += [measured(256, 0.9 - 0.3 * seen, "seen", seen) for seen in (0, 1)]
        facts = {"label": label, "learning_rate": 3e-3, "parameters": 123_000, "state_floats": 4096}
        standings.append({**facts, "seeds": [0], "steps": 1000, "train_accuracy": 0.99, "training": curve, "accuracy": found})
        for rate in (1e-3, 3e-3):
            ended = {"steps": 1000, "train_accuracy": 0.9, "seconds": 61.0, "reached": False, "diverged": False, "run": f"run{i}"}
            train = [{"task": "mqar", "length": 64, "pairs": 4, "share": 1.0}]
            rows.append({"kind": "task", "label": label, "learning_rate": rate, "seed": 0, "train": train, **ended, **PROVENANCE})
    return {"kind": "task comparison", "preset": "mqar", "standings": standings, "rows": rows, **PROVENANCE}


def look(name, **arguments):
    """What `inspect` writes for a tiny model."""
    ids, needle = tokens(120), Needle(begin=20, end=30, question=100, asked=105, asked_end=115)
    model = tiny_model(**arguments)
    view = inspect_memory(model, ids, chunk=16, top=3, needle=needle)
    depths = [
        {"length": length, "depth": depth, "samples": 8, "prompt_tokens": length - 20.0, "nats": 9.5, "nats_per_token": 1.2 + depth / 100}
        | {"accuracy": 0.25, "low": 0.07, "high": 0.59}
        for length in (512, 1024, 2048)
        for depth in (0, 50, 100)
    ]
    return {
        "kind": "microscope",
        "label": name,
        "mixers": model.config.mixers,
        "source": "a <text>",
        "tokens": 120,
        "settings": {"chunk": 16},
        "view": summarise_view(view),
        "without_memory": view.without_memory,
        "needle": {"spans": needle._asdict(), "text": "", "answer": {"nats": 12.5, "tokens": 8, "retrieved": False}},
        "depth_map": depths,
        "meaning": TOKENS | STATES,
        **PROVENANCE,
    }


@pytest.fixture(scope="session")
def seen():
    """Two models side by side."""
    return [look("first", mixer="kla+ccq"), look("second", mixer="gla+ccq")]


@pytest.fixture
def bench():
    """Rows of a benchmark."""
    fixed = {"kind": "forward", "backend": "triton", "floor_ms": 0.12}
    rows = [fixed | {"shape": [1, 1024 * 2**i, 16, 128, 128], "work": f"forward/{i}", "ms": 0.5 * 2**i, **PROVENANCE} for i in range(4)]
    return {"kind": "rows", "name": "ops.jsonl", "rows": [*rows, {"kind": "odd", "note": "alone", "value": None, "flag": True}]}


@pytest.fixture
def evaluated():
    """What `eval` writes for two models: a task, needles at three lengths and a curve."""

    def row(label, task, **more):
        facts = {"model": f"models/{label}", "fingerprint": "c099f787", "parameters": 18_612, "dtype": "float32", "lm_eval": "0.4.13"}
        asked = {"limit": None, "seconds": 1.4, "samples": 24, "truncated": 0, "max_length": None, "document_token": True, "few_shot": 0}
        where = {"data": {"file": f"{task}.jsonl"}, "note": "", "prompt_tokens": [25, 55.5, 83], "run": f"{label}-{task}", "shown": 1}
        return {"kind": "evaluation", "label": label, "task": task, **facts, **asked, **where, **more, **PROVENANCE}

    def score(metric, value):
        return [{"metric": metric, "higher_is_better": True, "value": value, "low": value - 0.1, "high": value + 0.1}]

    def point(length, bits):
        estimates = {name: {"value": bits, "low": bits - 0.1, "high": bits + 0.1} for name in ("bits_per_byte", "tail_bits_per_byte")}
        return {"length": length, **estimates, "perplexity": 2**bits, "tail_perplexity": 2**bits, "tokens": 40_960, "documents": 9}

    models = ["kla+ccq-a-rather-long-name-of-a-model", "gla"]
    rows = [row(label, "piqa", group="zero-shot", scores=score("acc", 0.54)) for label in models]
    for i, label in enumerate(models):
        for length in (1024, 2048, 4096):
            needle = {"group": "needles", "variant": 1, "length": length, "splitter": "fastweights"}
            rows.append(row(label, f"niah_single_1_{length}", **needle, scores=score(str(length), 0.9 - 0.2 * i * length / 4096)))
        points = [point(4096 * 2**j, 2.3 - 0.1 * j - 0.05 * i) for j in range(3)]
        rows.append(row(label, "curve_books", group="curves", points=points, tail=2048, same_tokens=True))
    groups = [{"label": label, "group": "zero-shot", "tasks": ["piqa"], "value": 0.54} for label in models]
    return {"kind": "evaluation", "suite": "offline", "models": models, "rows": rows, "missing": [], "groups": groups, **PROVENANCE}
