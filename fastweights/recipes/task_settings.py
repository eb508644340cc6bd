"""What can be set about a comparison on a task. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fastweights.recipes.task_presets import TaskSettings

SIZE = ("hidden_size", "num_hidden_layers", "num_heads", "intermediate_size", "expand_k", "expand_v", "conv_size")


@dataclass(kw_only=True, frozen=True)
class TaskCompareSettings:
    """Train mixers from scratch on a task, and compare what they recall.

    Interrupt it as you like: the same command goes on where it stopped, and what is finished is not done again.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    task: str
    """The task, its training mixture, model size, learning rates and seeds: mqar (minutes on a laptop), mqar-zoology-64,
    mqar-zoology-128, mqar-zoology-256, mqar-kla, one-pair-kla, palindrome-kla, stack-kla, parity, s3, s5, s3-swaps, s5-swaps,
    needle-bytes."""
    mixers: tuple[str, ...] = ("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq")
    """What to compare. Options of the rules, or of the shape, after colons: `kla:eta_max=2:expand_v=4`. A pattern over the layers with
    commas: `kla,softmax`."""
    learning_rates: tuple[float, ...] = ()
    """The grid, in place of the preset's."""
    seeds: tuple[int, ...] = ()
    """In place of the preset's."""
    more_seeds: tuple[int, ...] = ()
    """When the grid is done: each mixer with these seeds too, at the learning rate that was best in training."""
    steps: int | None = None
    """Optimizer steps at most, in place of the preset's."""
    batch_size: int | None = None
    """Fresh sequences a step, in place of the preset's."""
    samples: int | None = None
    """Sequences a measurement, in place of the preset's."""
    precision: Literal["fp32", "tf32", "bf16"] | None = None
    """Of the matrix products, in place of the preset's: tf32 is float32 rounded to 10 bits for a GPU's tensor cores, and the
    memories stay in float32; bf16 rounds to 7, the memories' operands too."""
    hidden_size: int | None = None
    """Width of the residual stream, in place of the preset's."""
    num_hidden_layers: int | None = None
    """Blocks, in place of the preset's."""
    num_heads: int | None = None
    """Heads of the mixer, in place of the preset's."""
    intermediate_size: int | None = None
    """Width of the MLP, the same for every mixer; 0 for none."""
    expand_k: float | None = None
    """Key size of all heads together, relative to the width."""
    expand_v: float | None = None
    """Value size of all heads together, relative to the width."""
    conv_size: int | None = None
    """Taps of the causal convolution; 0 for none."""
    out: Path | None = None
    """Folder for rows (results.jsonl), results.json and report.html; runs/TASK by default."""
    save_models: bool = False
    """Leave every model that is trained in OUT/models, for `fastweights eval --suite kla-paper` and `inspect`. A run that
    is finished already has left none: restart it."""
    restart: bool = False
    """Forget what earlier runs of these settings left in the folder, and start over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    processes: int = 0
    """Processes that train a model each; 0 chooses: one per core on the CPU, one on a GPU."""
    at_once: int = 0
    """Models that one process trains in turn, step by step. On a GPU their steps run side by side, and fill it though each is small.
    0 chooses: 8 on a GPU, 1 on the CPU."""
    graphs: bool = True
    """On a GPU, repeat training steps as CUDA graphs: one launch a step instead of some hundred."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether training goes through torch.compile, which takes some seconds a mixer and then makes a step's many small operations
    few; `auto` does where steps are CUDA graphs."""
    minutes: float | None = None
    """Stop after so many minutes, as an interrupt would: with checkpoints, and a report of what is finished. None: at the end."""

    def __post_init__(self) -> None:
        from fastweights.recipes.task_presets import TASK_PRESETS

        if self.task not in TASK_PRESETS:
            raise ValueError(f"task={self.task!r} is not one of {', '.join(TASK_PRESETS)}")
        if not self.mixers or len(set(self.mixers)) < len(self.mixers):
            raise ValueError(f"mixers={list(self.mixers)}: give at least one, and none twice")
        for name in ("processes", "at_once"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        if self.processes > 1 and self.at_once > 1:
            raise ValueError(f"processes={self.processes} and at_once={self.at_once}: a model has its own process or takes turns, not both")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes} is not positive")
        grid = self.preset
        for name, numbers in (("learning_rates", grid.learning_rates), ("seeds", grid.seeds), ("more_seeds", self.more_seeds)):
            if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
                raise ValueError(f"{name}={list(numbers)}: give none twice and none that is negative")
        if both := {*grid.seeds} & {*self.more_seeds}:
            raise ValueError(f"more_seeds={list(self.more_seeds)}: {sorted(both)} are in the grid already")

    @property
    def preset(self) -> TaskSettings:
        """The preset with the changes asked for."""
        from fastweights.recipes.task_presets import TASK_PRESETS

        preset = TASK_PRESETS[self.task]
        of_training = ("learning_rates", "seeds", "steps", "batch_size", "samples", "precision")
        return dataclasses.replace(preset, model=dataclasses.replace(preset.model, **self._given(SIZE)), **self._given(of_training))

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, ())}

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return self.out or Path("runs") / self.task
