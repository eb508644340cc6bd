import math

import pytest


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
    provenance = {
        "command": "fastweights demo",
        "commit": "abc1234567",
        "device": "A processor, 2 threads",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "time": "2030-01-01T00:00:00+00:00",
    }
    summary = [entry(i, label) for i, label in enumerate(labels)]
    rows = [e | provenance | {"seed": 0, "run": f"run{i}", "seconds": 61.5} for i, e in enumerate(summary)]
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
    return {"kind": "comparison", "settings": settings, "text": text, "summary": summary, "rows": rows, **provenance}
