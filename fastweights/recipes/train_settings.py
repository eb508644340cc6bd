"""What can be set about a training run. Importing this loads nothing heavy: the command line is made from these classes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastweights.recipes.settings import EvaluateSettings
from fastweights.train.presets import SIZES, ModelSize, TrainSettings

LOGGERS = ("tensorboard", "trackio", "wandb")
CHANGEABLE = {"out", "restart", "device", *LOGGERS, "evaluate", "train.save_every", "train.keep_checkpoints", "train.spike"}
"""What the trained weights do not depend on: these may differ when a run goes on."""


@dataclass(kw_only=True, frozen=True)
class TrainingRun:
    """Train a language model on text. Start from a preset with --preset NAME, and change any part of it.

    Interrupt it as you like: the same command goes on where it stopped.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    preset: str = "none"
    """Where all settings that are not given come from; the names are above."""
    mixer: str = "kla+ccq"
    """`write[+read]` or `softmax`. `kla+ccq:ccq_strength=learned` sets an option, `kla+ccq,softmax` alternates layers. An
    option of the shape, `kla:expand_v=4`, goes before the flag of its name."""
    model: ModelSize = field(default_factory=lambda: SIZES["5m"])
    init_from: str = ""
    """Fine-tune: folder or hub's name of a model of ours to start from. Mixer, shape and tokenizer are then its own."""
    lora_rank: int = 0
    """Rank of the low-rank adapters that are trained in place of the weights of `init_from`, which needs peft; 0 trains all weights."""
    data: tuple[str, ...] = ("stdlib",)
    """Files, folders, parquet or jsonl (`text`), or `stdlib`: Python's own source. Streamed from the hub: `fineweb-edu`, `slimpajama`,
    `hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]`. A mixture: `english:0.8 stdlib:0.2`, shares of the windows."""
    validation: tuple[str, ...] = ()
    """Files to validate on; then `data` is trained on whole. Else a tenth of all files by a hash of each document, and of a data set on
    the hub its validation split or its first 1,000 documents."""
    tokenizer: str = "bytes"
    """`bytes`, or a folder or name of a Hugging Face tokenizer."""
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    seed: int = 0
    """Draws the weights and the order of the text."""
    export_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in the finished model's folder, gates and norms excepted, which stay float32."""
    tensorboard: bool = True
    """Log for TensorBoard, in the run's folder."""
    trackio: bool = False
    """Log with trackio, which must be installed."""
    wandb: bool = False
    """Log with Weights & Biases, which must be installed."""
    out: Path = Path("runs/train/run")
    """Folder for settings (run.json), the training curve (metrics.jsonl), checkpoints, the result (result.json) and the model (model/)."""
    restart: bool = False
    """Remove what an earlier run left in the folder, and start over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank={self.lora_rank} is negative")
        if self.lora_rank and not self.init_from:
            raise ValueError(f"lora_rank={self.lora_rank} adapts a trained model: give init_from")
        if self.lora_rank and self.train.sharding == "fsdp2":
            raise ValueError(f"lora_rank={self.lora_rank} with sharding='fsdp2': adapters are trained with sharding='ddp'")

    @property
    def loggers(self) -> tuple[str, ...]:
        """The loggers asked for, by the Trainer's names."""
        return tuple(name for name in LOGGERS if getattr(self, name))


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Settings as plain data by dotted names, such as `train.steps`."""
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{entry.name}.")
        else:
            found[f"{prefix}{entry.name}"] = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return found


def determining(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of `flat` that the trained weights depend on."""
    return {name: value for name, value in settings.items() if not {name, name.partition(".")[0]} & CHANGEABLE}
