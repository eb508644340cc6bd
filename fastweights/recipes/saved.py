"""The folder of a saved model, as the commands take it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loading import load_config, load_whole
from fastweights.recipes.folder import check_saved
from fastweights.train.tokenizer import load_tokenizer


def saved_config(folder: str) -> FastWeightsConfig:
    """The configuration in a folder that ``save_pretrained`` wrote, whose weights are whole as far as their files' heads say.

    Raises:
        ValueError, OSError: no such folder, a damaged file in it, or another kind of model.
    """
    check_saved(folder)
    config = load_config(folder)
    if not isinstance(config, FastWeightsConfig):
        raise ValueError(f"{folder!r} holds a model of type {config.model_type!r}; this is for models of fastweights")
    load_whole(FastWeightsForCausalLM, folder, device_map="meta")
    return config


def load_saved(folder: str, device: str, dtype: torch.dtype | None = None) -> tuple[FastWeightsForCausalLM, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer. ``dtype`` None: as it was saved. Raises as `saved_config`."""
    saved_config(folder)
    as_saved: Any = "auto"
    return load_whole(FastWeightsForCausalLM, folder, dtype=dtype or as_saved, device_map=device), load_tokenizer(folder)
