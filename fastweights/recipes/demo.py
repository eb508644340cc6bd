"""`fastweights demo`: the comparison that ships, on text that every Python has, in minutes on two cores."""

from __future__ import annotations

from pathlib import Path

from fastweights.recipes.settings import CompareSettings, EvaluateSettings
from fastweights.train.presets import TrainSettings

DEMO = CompareSettings(
    mixers=("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq"),
    train=TrainSettings(steps=600, learning_rate=6e-3),
    evaluate=EvaluateSettings(prompt="class Queue:\n    def __init__(self"),
    out=Path("runs/demo"),
)
