"""What can be set about a comparison. Importing this loads nothing heavy: the command line is made from these classes."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastweights.train.presets import SIZES, ModelSize, TrainSettings

OF_MEMORIES = ("num_value_heads", "expand_k", "expand_v", "conv_size")
"""What of a model's shape only memories have."""


class Variant(NamedTuple):
    """One thing to compare: a mixer, or a pattern of them over the layers, with options of its rules."""

    label: str
    pattern: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def parse(cls, label: str) -> Variant:
        """`kla+ccq`; `kla+ccq:ccq_strength=learned:eta_max=2` with options; `kla+ccq,softmax` repeated over the layers.

        Raises:
            ValueError: an option without a value, or with two.
        """
        mixers, *settings = label.split(":")
        options = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not (name and equals and value):
                raise ValueError(f"{setting!r} in {label!r} is not an option of the form name=value")
            if name in options:
                raise ValueError(f"{label!r} gives {name} twice")
            options[name] = _literal(value)
        return cls(label, tuple(mixers.split(",")), options)

    def mixer(self, layers: int) -> str | list[str]:
        """The `mixer` of a `FastWeightsConfig`."""
        return self.pattern[0] if len(self.pattern) == 1 else [self.pattern[i % len(self.pattern)] for i in range(layers)]

    def config(self, size: ModelSize, **more: Any) -> dict[str, Any]:
        """Arguments of a `FastWeightsConfig` of this size. Options may be of the shape, too: `kla:expand_v=4`.

        Raises:
            ValueError: an option that would replace the mixer or one of ``more``, which come with the text or task; one that a
                `FastWeightsConfig` takes and a label cannot give; or one that would do nothing.
        """
        if fixed := [name for name in self.options if name in ("mixer", *more)]:
            raise ValueError(f"{self.label!r} cannot set {', '.join(fixed)}: the name is the mixer, and the rest comes with what is read")
        if strange := [name for name in self.options if name in ("self", "dtype", "torch_dtype")]:
            raise ValueError(f"{self.label!r} cannot set {', '.join(strange)}: options are those of the rules and of the model's shape")
        if set(self.pattern) == {"softmax"} and (idle := [name for name in self.options if name in OF_MEMORIES]):
            raise ValueError(f"{self.label!r} sets {', '.join(idle)}, which softmax attention does not have")
        shape = dataclasses.asdict(size) | more | self.options
        layers = shape["num_hidden_layers"]
        if not isinstance(layers, int):
            raise ValueError(f"num_hidden_layers={layers!r} in {self.label!r} is not a whole number")
        return {"mixer": self.mixer(layers), **shape}


@dataclass(kw_only=True, frozen=True)
class SizeChanges:
    """Fields that replace those of every size; None leaves them."""

    hidden_size: int | None = None
    """Width of the residual stream."""
    num_hidden_layers: int | None = None
    """Blocks, each a mixer and an MLP."""
    num_heads: int | None = None
    """Heads of the mixer."""
    intermediate_size: int | None = None
    """Width of the MLP of the mixer with the most parameters; the others' is widened until all have as many."""
    expand_k: float | None = None
    """Key size of all heads together, relative to the width."""
    expand_v: float | None = None
    """Value size of all heads together, relative to the width."""
    conv_size: int | None = None
    """Taps of the causal convolution; 0 for none."""

    def apply(self, size: ModelSize) -> ModelSize:
        return dataclasses.replace(size, **{name: value for name, value in dataclasses.asdict(self).items() if value is not None})


@dataclass(kw_only=True, frozen=True)
class EvaluateSettings:
    """What is measured after training, on the validation text.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    validation_tokens: int = 2**18
    """Tokens scored at the training length, at most."""
    longest: int = 16
    """The longest context of the curve, in training lengths; a power of two."""
    length_tokens: int = 2**17
    """Tokens scored at each context length, at most; the same at each."""
    prompt: str = ""
    """What the generated sample goes on from; empty for the beginning of a document."""
    sample_tokens: int = 400
    """Tokens to generate."""
    temperature: float = 0.7
    """Of the sampling; lower is more likely text."""

    def __post_init__(self) -> None:
        if self.longest < 1 or self.longest & (self.longest - 1):
            raise ValueError(f"longest={self.longest} is not a power of two")
        for name in ("validation_tokens", "length_tokens", "temperature"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.sample_tokens < 0:
            raise ValueError(f"sample_tokens={self.sample_tokens} is negative")

    def lengths(self, sequence_length: int) -> list[int]:
        """Context lengths of the curve, in tokens."""
        return [sequence_length * 2**i for i in range(self.longest.bit_length())]


@dataclass(kw_only=True, frozen=True)
class CompareSettings:
    """Train mixers at equal parameters on the same batches, and compare them.

    Interrupt it as you like: the same command goes on where it stopped, and what is finished is not done again.
    """

    mixers: tuple[str, ...] = ("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq")
    """What to compare; differences are to the first. `kla+ccq:ccq_strength=learned` sets an option, `kla+ccq,softmax` alternates layers."""
    sizes: tuple[str, ...] = ("0.3m",)
    """Named model sizes."""
    change: SizeChanges = field(default_factory=SizeChanges)
    seeds: tuple[int, ...] = (0,)
    """Each mixer is trained once per seed; the seed draws the weights and the order of the text."""
    data: tuple[str, ...] = ("stdlib",)
    """Files, folders, parquet or jsonl (`text`), or `stdlib`: Python's own source. Split 80/10/10 by a hash of each document."""
    validation: tuple[str, ...] = ()
    """Text to validate on; then `data` is trained on whole."""
    tokenizer: str = "bytes"
    """`bytes`, or a folder or name of a Hugging Face tokenizer."""
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    out: Path = Path("runs/compare")
    """Folder for models, rows (results.jsonl), results.json and report.html."""
    restart: bool = False
    """Forget what earlier runs of these settings left in the folder, and start over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    processes: int = 0
    """Models trained at the same time; 0 chooses: one per core on the CPU, one on a GPU. Cores are shared out."""

    def __post_init__(self) -> None:
        for name in ("mixers", "sizes", "seeds"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ValueError(f"{name}={list(given)}: give at least one, and none twice")
        for size in self.sizes:
            if size not in SIZES:
                raise ValueError(f"size {size!r} is not one of {', '.join(SIZES)}")
        if self.processes < 0:
            raise ValueError(f"processes={self.processes} is negative")

    @property
    def lengths(self) -> list[int]:
        """Context lengths of the curve, in tokens."""
        return self.evaluate.lengths(self.train.sequence_length)


def _literal(value: str) -> Any:
    """`2`, `true` and `None` as what they mean in Python, and words as themselves."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return value
