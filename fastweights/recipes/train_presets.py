"""Named runs of `fastweights train`. Importing this loads nothing heavy.

A name is `mixer-size`. All presets of one size have the parameters of its kla model, to 0.1 %: `WIDTHS` says where an MLP is wider or
narrower for that. They share heads, K and V too, so their memories have the same size; with CCQ a layer also holds Σ, and `-equal-state`
halves V to pay for it. `-published` is a baseline of KLA's paper that had another shape.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from fastweights.recipes.settings import EvaluateSettings
from fastweights.recipes.train_settings import TrainingRun
from fastweights.train.presets import SIZES, ModelSize, TrainSettings

MIXERS = {
    "kla": "kla",
    "gdn": "gated_deltanet",
    "deltanet": "deltanet",
    "gla": "gla",
    "longhorn": "longhorn",
    "mamba2": "mamba2",
    "transformer": "softmax",
    "kla+ccq": "kla+ccq",
    "gdn+ccq": "gated_deltanet+ccq:ccq_unit_keys=false",
    "gla+ccq": "gla+ccq:ccq_unit_keys=false",
}
"""By the first part of a preset's name. The two that claim CCQ's paper take Σ of the keys as written, as it does."""

WIDTHS: dict[str, dict[str, int]] = {
    "5m": {"deltanet": 641, "gla": 632, "mamba2": 641, "transformer": 732, "gla+ccq": 632},
    "25m": {"deltanet": 1219, "gla": 1210, "mamba2": 1219, "transformer": 1396, "gla+ccq": 1208},
    "60m": {"deltanet": 1539, "gla": 1532, "mamba2": 1539, "transformer": 1760, "gla+ccq": 1531},
    "125m": {"deltanet": 1732, "mamba2": 1732, "transformer": 1996, "gla+ccq": 1725},
    "0.4b": {"transformer": 7184, "kla+ccq-equal-state": 7296, "gdn+ccq-equal-state": 7296, "gla+ccq-equal-state": 7296},
    "500m": {"transformer": 4256, "kla+ccq-equal-state": 4352, "gdn+ccq-equal-state": 4352, "gla+ccq-equal-state": 4352},
    "1.3b": {"transformer": 6824, "kla+ccq-equal-state": 6976, "gdn+ccq-equal-state": 6976, "gla+ccq-equal-state": 6976},
}
"""Width of the MLP where it is not that of `SIZES`: the same where that is within 0.1 %, else a multiple of 8 if one is, else the nearest
whole number."""

MISTRAL = "mistralai/Mistral-7B-v0.1"
"""32,000 pieces, as both papers use, under Apache-2.0; neither paper names its own."""

_SAMPLE = EvaluateSettings(validation_tokens=2**17, longest=16, length_tokens=24 * 4096, prompt="class Queue:\n    def __init__(self")
_SMALL = TrainSettings(steps=2000, batch_tokens=2048, sequence_length=256, learning_rate=6e-3, save_every=50)
_SMALL_RATES = {"5m": 4e-3, "25m": 3e-3, "60m": 2e-3, "125m": 2e-3}
_KLA = TrainSettings(
    steps=476,
    batch_tokens=512 * 4096,
    sequence_length=4096,
    learning_rate=1e-4,
    warmup=0.01,
    accumulation=64,
    precision="bf16",
    save_every=20,
    log_every=1,
)
_CCQ = TrainSettings(
    steps=19_073,
    batch_tokens=128 * 4096,
    sequence_length=4096,
    learning_rate=4e-4,
    warmup=0.1,
    accumulation=16,
    precision="bf16",
    save_every=500,
    log_every=10,
)
_LONG = EvaluateSettings(validation_tokens=2**22, longest=4, length_tokens=2**20, prompt="The", sample_tokens=200)


class Preset(NamedTuple):
    """A named run, and where its settings are from."""

    source: str
    run: TrainingRun


def _byte() -> Preset:
    size = ModelSize(hidden_size=192, num_hidden_layers=3, num_heads=3, intermediate_size=192)
    train = dataclasses.replace(_SMALL, steps=1000)
    run = _run("byte", "kla+ccq", size, train=train, evaluate=_SAMPLE, export_dtype="bf16")
    return Preset("ours: the model that ships with the package, at most 2 MB", run)


def _small(mixer: str, size: str) -> Preset:
    train = dataclasses.replace(_SMALL, learning_rate=_SMALL_RATES[size])
    run = _run(f"{mixer}-{size}", MIXERS[mixer], _shape(mixer, size), train=train, evaluate=_SAMPLE)
    return Preset("ours: bytes of Python's standard library, on a laptop or one GPU", run)


def _large(name: str, size: str, source: str, *, data: str, train: TrainSettings) -> Preset:
    mixer, state, _ = name.partition("-equal-state")
    of_text = {"data": (data,), "tokenizer": MISTRAL, "evaluate": _LONG}
    return Preset(source, _run(f"{mixer}-{size}{state}", MIXERS[mixer], _shape(name, size), train=train, **of_text))


def _mamba2_published() -> Preset:
    """One group of keys and queries (B and C) for all 32 heads, no MLP, as the paper's baseline; the shell is ours (docs/rules.md)."""
    size = ModelSize(
        hidden_size=1024, num_hidden_layers=48, num_heads=1, num_value_heads=32, intermediate_size=0, expand_k=0.125, expand_v=2.0
    )
    run = _run("mamba2-0.4b-published", "mamba2", size, train=_KLA, evaluate=_LONG, data=("slimpajama",), tokenizer=MISTRAL)
    return Preset('KLA\'s Mamba-2 "0.4B" baseline (arXiv 2605.08587), 317 M parameters and 33 M of embeddings', run)


def _shape(name: str, size: str) -> ModelSize:
    shape = SIZES[size]
    width = WIDTHS[size].get(name, shape.intermediate_size)
    expand_v = shape.expand_v / 2 if name.endswith("-equal-state") else shape.expand_v
    return dataclasses.replace(shape, intermediate_size=width, expand_v=expand_v)


def _run(name: str, mixer: str, model: ModelSize, **settings) -> TrainingRun:
    return TrainingRun(preset=name, mixer=mixer, model=model, out=Path("runs/train", name), **settings)


def _presets() -> dict[str, Preset]:
    linear = ("kla", "gdn", "deltanet", "gla", "longhorn", "mamba2", "transformer")
    ccq = ("kla+ccq", "gdn+ccq", "gla+ccq")
    kla_paper = 'shape and training of KLA\'s "0.4B" models (arXiv 2605.08587): 1 B tokens of SlimPajama'
    ccq_paper = "size, text and training of CCQ's models (arXiv 2606.01294); shape and number of tokens (20 a parameter) are ours"
    gdn_suite = "size and text of CCQ's models (arXiv 2606.01294), training of Gated DeltaNet's suite: 100 B tokens; the shape is ours"
    longer = dataclasses.replace(_CCQ, steps=190_735, warmup=0.01)
    found = [_byte()]
    for size in _SMALL_RATES:
        found += [_small(mixer, size) for mixer in linear + ccq]
    for name in (*linear, *ccq, *(f"{mixer}-equal-state" for mixer in ccq)):
        found.append(_large(name, "0.4b", kla_paper, data="slimpajama", train=_KLA))
    found.append(_mamba2_published())
    for size, source, train in (("500m", ccq_paper, _CCQ), ("1.3b", gdn_suite, longer)):
        for name in ("kla", "gdn", "gla", "mamba2", "transformer", *ccq, *(f"{mixer}-equal-state" for mixer in ccq)):
            found.append(_large(name, size, source, data="fineweb-edu", train=train))
    return {preset.run.preset: preset for preset in found}


PRESETS: dict[str, Preset] = _presets()
"""By name."""


def preset_run(name: str) -> TrainingRun:
    """The settings of a preset.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name].run
