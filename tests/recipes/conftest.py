import json

import pytest

from fastweights.recipes.settings import CompareSettings, EvaluateSettings, SizeChanges
from fastweights.train.presets import TrainSettings

WORDS = ["memory", "is", "written", "by", "a", "rule", "and", "read", "by", "a", "query", "until", "every", "key", "has", "a", "value"]


@pytest.fixture
def text(tmp_path):
    """A jsonl of 60 short documents, cached in the test's own folder."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(WORDS[(i * j) % 17] for j in range(30))}) + "\n" for i in range(60)))
    return path


@pytest.fixture
def small(tmp_path, text, monkeypatch):
    """A comparison of seconds; give what differs."""
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))

    def settings(**changes):
        given = {
            "mixers": ("kla", "kla+ccq"),
            "change": SizeChanges(hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=48),
            "data": (str(text),),
            "train": TrainSettings(steps=6, batch_tokens=64, sequence_length=16, save_every=2, log_every=2),
            "evaluate": EvaluateSettings(validation_tokens=256, longest=4, length_tokens=128, prompt="the", sample_tokens=8),
            "out": tmp_path / "out",
            "device": "cpu",
            "processes": 1,
        }
        return CompareSettings(**given | changes)

    return settings
