import dataclasses
import io
import json

import pytest
from rich.console import Console

from fastweights.recipes.settings import CompareSettings, EvaluateSettings, SizeChanges
from fastweights.recipes.task_compare import plan_jobs, run_plan
from fastweights.recipes.task_job import TaskJob
from fastweights.recipes.task_presets import TASK_PRESETS
from fastweights.recipes.task_settings import TaskCompareSettings
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


@pytest.fixture
def job(request, tmp_path):
    """A training of the module's `SMALL` task settings; give what differs."""

    def job(**changes):
        settings = dataclasses.replace(request.module.SMALL, **changes.pop("settings", {}))
        given = dict(preset="small", settings=settings, label="kla", learning_rate=1e-2, seed=0, folder=tmp_path, device="cpu")
        return TaskJob(**given | changes)

    return job


@pytest.fixture
def compared(request, tmp_path, monkeypatch):
    """Compare on the module's `SMALL` as its `COMPARED` says, in this process: (results, what the terminal showed)."""
    monkeypatch.setitem(TASK_PRESETS, "small", request.module.SMALL)

    def compared(**changes):
        given = dict(task="small", out=tmp_path / "out", device="cpu") | request.module.COMPARED
        settings, shown = TaskCompareSettings(**given | changes), io.StringIO()
        return run_plan(settings, plan_jobs(settings), Console(file=shown, width=200)), shown.getvalue()

    return compared
