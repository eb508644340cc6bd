"""RULER's single needles as the harness makes them, without its downloads: any tokenizer object, a local haystack, a local splitter.

The harness's generator and wording are used as they are. It needs NLTK's Punkt model to split the essays into sentences, and fetches that
while it is imported; where the model is not on the machine, `fastweights.tasks.text.split_sentences` takes its place.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import datasets
from lm_eval.api.task import Task

from fastweights.evaluate.harness.tasks import SEED, Unavailable, load_task, quiet
from fastweights.tasks.text import split_sentences

SAMPLES = 500
"""Needles at each length, as in RULER."""
KINDS = {1: ("repeat", "numbers"), 2: ("essay", "numbers"), 3: ("essay", "uuids")}
"""Variant -> haystack and what is hidden in it."""


class Needle(NamedTuple):
    variant: int
    length: int
    """Tokens, the 128 for the answer included."""

    @property
    def task(self) -> str:
        """The harness's name, which has no length in it."""
        return f"niah_single_{self.variant}"


def load_needle(needle: Needle, tokenizer: Any, *, essays: Path | None, samples: int = SAMPLES) -> Task:
    """The harness's needle task at one length.

    Args:
        tokenizer: called with a text it gives ``input_ids``.
        essays: json (``text``) or plain text of the haystack for variants 2 and 3; None: the data set that the harness fetches.

    Raises:
        Unavailable: no haystack, a missing package, or a length with no room for a needle.
    """
    haystack, kind = KINDS[needle.variant]
    try:
        harness, wording = _generator(), _wording()
    except ModuleNotFoundError as error:
        raise Unavailable(f"the package {error.name!r} is missing: pip install 'fastweights[eval]'") from error
    if haystack == "repeat":
        text: str | list[str] = harness.get_haystack(type_haystack="repeat")
    else:
        text = _essays(essays) if essays else _fetched_essays(harness)

    def draw(**ignored: Any) -> dict[str, datasets.Dataset]:
        random.seed(SEED)
        with quiet(), patch.object(harness, "tqdm", lambda iterable, **bar: iterable):
            rows = harness.generate_samples(
                text,
                TOKENIZER=tokenizer,
                max_seq_length=needle.length,
                template=wording,
                type_haystack=haystack,
                type_needle_k="words",
                type_needle_v=kind,
                num_samples=samples,
            )
        return {"test": datasets.Dataset.from_list(rows)}

    metric = {"metric": str(needle.length), "aggregation": "mean", "higher_is_better": True}
    try:
        return load_task(needle.task, changes={"custom_dataset": draw, "metric_list": [metric]})
    except ValueError as error:  # the generator's, when not one sample fits
        raise Unavailable(" ".join(str(error).split())) from error


def splitter() -> str:
    """Which sentence splitter the needles are made with, for the record."""
    return "fastweights" if _generator().sent_tokenize is split_sentences else "NLTK Punkt"


@cache
def _generator() -> ModuleType:
    """The harness's generator, imported without the download it would begin."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
        from lm_eval.tasks.ruler import prepare_niah
    except LookupError:
        with patch.object(nltk.data, "find"):
            from lm_eval.tasks.ruler import prepare_niah
        prepare_niah.sent_tokenize = split_sentences
    return prepare_niah


def _wording() -> str:
    from lm_eval.tasks.ruler import niah_utils

    return niah_utils.TEMPLATE


def _essays(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        text = json.loads(text)["text"] if path.suffix == ".json" else text
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{path} is not a haystack, json with a text or plain text: {error}") from error
    return re.sub(r"\s+", " ", text).split(" ")


def _fetched_essays(harness: ModuleType) -> list[str]:
    try:
        with quiet():
            return harness.get_haystack(type_haystack="essay")
    except OSError as error:
        where = "put RULER's essays into essays.json in the folder given by --data"
        raise Unavailable(f"the haystack cannot be fetched: {' '.join(str(error).split())[:200]}; {where}") from error
