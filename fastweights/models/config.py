"""The model's configuration. Importing this module registers it, and so the model, with transformers' auto classes."""

from __future__ import annotations

import dataclasses
import importlib
import math
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from fastweights.layers import FastWeightAttention, SoftmaxAttention, mixer_options
from fastweights.ops.dispatch import BACKENDS

FORMAT_VERSION = 1
"""Of saved folders. It rises when an old folder would otherwise load and mean something else."""

SHIM = '''"""With trust_remote_code=True, transformers loads this folder through this file. Without, `import fastweights` first."""

try:
    from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, FastWeightsModel
except ModuleNotFoundError as error:
    if error.name != "fastweights":
        raise
    raise ImportError("this model needs the package fastweights: pip install fastweights") from error

__all__ = ["FastWeightsConfig", "FastWeightsForCausalLM", "FastWeightsModel"]
'''
SHIM_FILE = "fastweights_shim.py"
AUTO_MAP = {
    "AutoConfig": "fastweights_shim.FastWeightsConfig",
    "AutoModel": "fastweights_shim.FastWeightsModel",
    "AutoModelForCausalLM": "fastweights_shim.FastWeightsForCausalLM",
}


KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "a word"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
    "None": (type(None), "none"),
    "list[str]": (str, "a list of words"),
    "list[int]": (Integral, "a list of whole numbers"),
}
"""How the fields' types are written: what is of that kind, each part of it in a list, and what people call it."""


# What transformers itself hands to a configuration, or writes into its file, besides the fields of `PreTrainedConfig`.
_TRANSFORMERS_NAMES = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {
    "model_type",
    "auto_map",
    "name_or_path",
    "torch_dtype",
    "num_labels",
    "tokenizer_class",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "gradient_checkpointing",
    "quantization_config",
}


class FastWeightsConfig(PreTrainedConfig):
    """A decoder of ``num_hidden_layers`` blocks, each a mixer and a SwiGLU. The defaults are KLA's "0.4B" model with CCQ's read.

    Besides the fields below, every option of the rules in use is an argument under its flat name (``eta_max``, ``ccq_forget``, …), as
    `fastweights.layers.mixer_options` lists them. An option that none of the mixers has is a ValueError, and so is a combination that no
    layer can be built with.
    """

    __no_type_check__: ClassVar[bool] = True  # of __init__, which transformers lets take more than the dataclass's signature says
    model_type = "fastweights"
    attribute_map: ClassVar[dict[str, str]] = {"num_attention_heads": "num_heads"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    mixer: str | list[str] = "kla+ccq"
    """``write[+read]`` or ``softmax`` for all layers; or a list with one mixer a layer."""
    vocab_size: int = 32_000
    """Tokens in the vocabulary."""
    hidden_size: int = 1536
    """Model width D."""
    num_hidden_layers: int = 11
    """Blocks; a list of mixers must have as many."""
    num_heads: int = 12
    """Key heads Hk, and the heads of softmax layers."""
    num_value_heads: int | None = None
    """Value heads Hv, a multiple of ``num_heads``; None: as many."""
    expand_k: float = 0.75
    """Width of all keys over model width: K = expand_k · hidden_size / num_heads."""
    expand_v: float = 1.5
    """Width of all values over model width: V = expand_v · hidden_size / num_value_heads."""
    conv_size: int = 4
    """Width of the convolution on q, k, v, in tokens; 0 leaves it out."""
    intermediate_size: int = 6144
    """Width of the SwiGLU; 0 leaves it out."""
    norm_eps: float = 1e-5
    """ε of the RMSNorms."""
    rope_theta: float = 10_000.0
    """Base of the rotary positions of softmax layers."""
    window_size: int | None = None
    """Tokens that softmax layers look back on, the token itself included; None: all."""
    tie_word_embeddings: bool = True
    """The output projection is the embedding."""
    initializer_range: float = 0.02
    """Standard deviation of embeddings and projections at the start; 1/√(2·layers) of it for the last projection of each SwiGLU."""
    out_proj_init: float = 1.0
    """How large the last projection of each mixer starts, relative to ``initializer_range``. 1, as KLA's code has it, lets the mixers drown
    the embedding at first: experiments/011_first_steps has what smaller ones gain."""
    use_cache: bool = True
    """Return the cache outside training."""
    backend: str = "auto"
    """Handed to `fastweights.ops`: ``auto``, ``reference``, ``torch``, ``triton``."""
    format_version: int = FORMAT_VERSION
    """Of the saved folder."""
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        self._check_kinds()
        if self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version}: this fastweights reads format {FORMAT_VERSION}; install the one that saved it"
            )
        if not isinstance(self.mixer, str):
            self.mixer = list(self.mixer)
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(f"mixer lists {len(self.mixers)} layers and num_hidden_layers is {self.num_hidden_layers}; they must agree")
        if self.window_size is not None and "softmax" not in self.mixers:
            raise ValueError(f"window_size={self.window_size} is for softmax layers, and mixer={self.mixer!r} has none")
        for name, default in self._options().items():
            setattr(self, name, kwargs.pop(name, default))
        self._refuse_unknown(kwargs)
        kwargs.pop("auto_map", None)  # `to_dict` writes it anew
        super().__post_init__(**kwargs)
        self._build_each_mixer()
        importlib.import_module("fastweights.models.modeling")  # registers the models: from here on one may be asked for

    @property
    def mixers(self) -> list[str]:
        """One mixer a layer."""
        return [self.mixer] * self.num_hidden_layers if isinstance(self.mixer, str) else self.mixer

    def build_mixer(self, layer: int) -> nn.Module:
        """The mixer of block ``layer``; ValueError if the options do not fit it."""
        mixer = self.mixers[layer]
        if mixer == "softmax":
            return SoftmaxAttention(
                hidden_size=self.hidden_size, num_heads=self.num_heads, window_size=self.window_size, rope_theta=self.rope_theta
            )
        num_value_heads = self.num_heads if self.num_value_heads is None else self.num_value_heads
        return FastWeightAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_value_heads=num_value_heads,
            head_k_dim=_head_size("expand_k", float(self.expand_k), self.hidden_size, self.num_heads),
            head_v_dim=_head_size("expand_v", float(self.expand_v), self.hidden_size, num_value_heads),
            mixer=mixer,
            conv_size=self.conv_size,
            norm_eps=self.norm_eps,
            backend=self.backend,
            **{name: getattr(self, name) for name in mixer_options(mixer)},
        )

    def _check_kinds(self) -> None:
        """A file, and a dataclass, may hold anything."""
        for name, annotation in FastWeightsConfig.__annotations__.items():
            if annotation.startswith("ClassVar"):
                continue
            value, wanted = getattr(self, name), annotation.split(" | ")
            if not any(_is_a(value, kind) for kind in wanted):
                raise ValueError(f"{name}={value!r} is not {' or '.join(KINDS[kind][1] for kind in wanted)}")
        if self.out_proj_init < 0:
            raise ValueError(f"out_proj_init={self.out_proj_init} is negative; 0 starts the projection at zero")
        for name in ("hidden_size", "num_heads", "num_value_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")

    def _build_each_mixer(self) -> None:
        """A configuration is possible if its layers can be built, so they are, once, without memory."""
        if self.num_hidden_layers < 1 or self.vocab_size < 1 or self.intermediate_size < 0:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} and vocab_size={self.vocab_size} must be positive, "
                f"intermediate_size={self.intermediate_size} not negative"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(BACKENDS)}")
        with torch.device("meta"):
            for mixer in dict.fromkeys(self.mixers):
                self.build_mixer(self.mixers.index(mixer))

    def _options(self) -> dict[str, object]:
        """Every option of the mixers in use, with its default."""
        options: dict[str, object] = {}
        for mixer in dict.fromkeys(self.mixers):
            for name, default in {} if mixer == "softmax" else mixer_options(mixer).items():
                assert options.setdefault(name, default) == default, f"rules that share the option {name} must share its default"
        return options

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        """What is left must be transformers' own; a misspelt option would otherwise become an attribute without effect."""
        unknown = [name for name in kwargs if name not in _TRANSFORMERS_NAMES and not name.startswith("_")]
        if unknown:
            fields = [field.name for field in dataclasses.fields(FastWeightsConfig) if field.name not in _TRANSFORMERS_NAMES]
            raise ValueError(
                f"FastWeightsConfig has no field or option {', '.join(map(repr, unknown))} with mixer={self.mixer!r}; "
                f"options of its rules: {', '.join(self._options()) or 'none'}; fields: {', '.join(fields)}"
            )

    def __eq__(self, other: object) -> bool:
        """Of all that is saved: the rules' options too, which are not dataclass fields."""
        return isinstance(other, FastWeightsConfig) and self.to_diff_dict() == other.to_diff_dict()

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"auto_map": AUTO_MAP}

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        Path(save_directory, SHIM_FILE).write_text(SHIM, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Nothing: transformers would copy our source files into saved folders, where the shim is enough."""


def _is_a(value: object, kind: str) -> bool:
    if kind.startswith("list"):
        return isinstance(value, (list, tuple)) and all(isinstance(part, KINDS[kind][0]) for part in value)
    return isinstance(value, KINDS[kind][0]) and isinstance(value, bool) == (kind == "bool")


def _head_size(name: str, expand: float, hidden_size: int, heads: int) -> int:
    size = expand * hidden_size / heads
    if not math.isfinite(size) or round(size) < 1 or abs(size - round(size)) > 1e-6:
        where = f"{name}={expand} · hidden_size={hidden_size} / {heads} heads"
        raise ValueError(f"{where} = {size:g} is not a head size; it must be a positive integer")
    return round(size)


AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig, exist_ok=True)
