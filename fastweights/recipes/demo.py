"""`fastweights demo`: the comparison that ships, on text that every Python has, in minutes on two cores."""

from __future__ import annotations

from pathlib import Path

from fastweights.recipes.settings import CompareSettings, EvaluateSettings
from fastweights.train.presets import TrainSettings

DEMO = CompareSettings(
    mixers=("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq"),
    sizes=("0.3m",),
    train=TrainSettings(steps=600, batch_tokens=1024, sequence_length=256, learning_rate=6e-3, save_every=50),
    evaluate=EvaluateSettings(
        validation_tokens=2**17, longest=16, length_tokens=24 * 4096, prompt="class Queue:\n    def __init__(self", sample_tokens=300
    ),
    out=Path("runs/demo"),
)
