"""What a prompt may be, and which tokens end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from fastweights.models import FastWeightsForCausalLM

Tokens = Int[np.ndarray, " _"]
"""Token ids of a text, int64: of a long one Python's own lists take as long as a GPU takes to read a tenth of it."""


def prompt_tokens(prompt: Any, tokenizer: PreTrainedTokenizerBase | None, *, begins: bool) -> Tokens:
    """Token ids of text, or of token ids in a list, an array or a tensor on the CPU; ValueError for anything else.

    ``begins``: the text begins here, so the tokenizer may put in front what it puts in front of texts.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text, and this engine has no tokenizer; give tokens")
        check_text(prompt)
        return np.array(tokenizer(prompt, add_special_tokens=begins, verbose=False)["input_ids"], np.int64)
    try:
        tokens = np.asarray(prompt)
    except (TypeError, RuntimeError) as error:  # of a tensor that is on a GPU, or of bfloat16
        raise ValueError(f"a prompt is text or a list of tokens: {error}") from None
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"a prompt is text or a list of tokens; got {tokens.dtype} of shape {list(tokens.shape)}")
    return tokens.astype(np.int64)


def joined(*texts: Sequence[int] | Tokens) -> Tokens:
    return np.concatenate([np.asarray(text, np.int64) for text in texts])


def check_text(text: str) -> None:
    """ValueError for half a character, which no tokenizer takes; Python makes them of bytes on the command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text cannot be written in UTF-8: {error.reason}, at character {error.start}") from None


def check_prompt(tokens: Tokens, new: int, before: int, vocabulary: int, max_context: int | None) -> None:
    """ValueError for a prompt that cannot be read after ``before`` tokens and answered with ``new`` ones."""
    if not len(tokens) and not before:
        raise ValueError("the prompt is empty: give at least one token, or a snapshot to go on from")
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise ValueError(f"the prompt has tokens from {tokens.min()} to {tokens.max()}; the model's are 0 to {vocabulary - 1}")
    prompt = before + len(tokens)
    if max_context is not None and prompt + new > max_context:
        raise ValueError(
            f"{prompt} tokens of prompt and max_new_tokens={new} make {prompt + new}; this engine takes max_context={max_context}"
        )


def end_tokens(model: FastWeightsForCausalLM, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Those at which `generate` ends; the tokenizer's where the model names none."""
    eos = model.generation_config.eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
