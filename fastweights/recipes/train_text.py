"""What the names after --data and --validation stand for: cached corpora, streams, mixtures of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from fastweights.recipes.job import Text
from fastweights.train.corpus import Corpus, join, keep_documents, load_corpus
from fastweights.train.hub import HubStream, held_out, hub_text
from fastweights.train.stream import CorpusStream, Stream, TokenStream


class Share(NamedTuple):
    """A name after --data, and its share of the windows; None where no share is given."""

    name: str
    weight: float | None

    @classmethod
    def parse(cls, text: str) -> Share:
        """`stdlib`, or `stdlib:0.2`."""
        name, colon, weight = text.rpartition(":")
        try:
            return cls(name, float(weight)) if colon else cls(text, None)
        except ValueError:
            return cls(text, None)


@dataclass(frozen=True)
class Mixture:
    """What a run reads where it is not one cached corpus. Plain data; `open` gives what the trainer takes."""

    shares: tuple[tuple[str | Text, float], ...]
    """A hub's name, or a cached corpus; and its weight."""
    excluded: tuple[str, ...]
    """Fingerprints of the documents that are validated on."""
    tokenizer: str
    seed: int

    def open(self) -> Stream:
        sources: list[TokenStream] = []
        for what, _ in self.shares:
            if isinstance(what, Text):
                sources.append(CorpusStream(what.open(), seed=self.seed))
            else:
                text = hub_text(what)
                assert text is not None
                sources.append(HubStream(text, self.tokenizer, seed=self.seed, excluded=frozenset(self.excluded)))
        return Stream(sources, [weight for _, weight in self.shares])

    @property
    def key(self) -> str:
        """The same key means the same tokens, as far as a data set on the hub stays what it is."""
        return " ".join(f"{what if isinstance(what, str) else what.open().key}:{weight:g}" for what, weight in self.shares)


@dataclass(frozen=True)
class Validation:
    """Cached corpora that are validated on together."""

    parts: tuple[Text, ...]

    def open(self) -> Corpus:
        return join([part.open() for part in self.parts])


def find_text(
    data: Sequence[str], validation: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, name: str, seed: int
) -> tuple[Text | Mixture, Validation]:
    """The text to train on and the text to validate on. `name` is the tokenizer's, by which other processes load it.

    Raises:
        ValueError, FileNotFoundError: names that stand for nothing, shares that are no shares, too little text.
    """
    shares = [Share.parse(text) for text in data]
    weighed = [share.weight for share in shares if share.weight is not None]
    if weighed and (len(weighed) < len(shares) or not all(math.isfinite(weight) and weight > 0 for weight in weighed)):
        raise ValueError(f"data={list(data)}: give a positive share to each source, as in english:0.8 python:0.2, or to none")
    apart = Validation((Text(load_corpus(validation, tokenizer).folder, None),)) if validation else None
    if not weighed and not any(hub_text(share.name) for share in shares):
        folder = load_corpus(data, tokenizer).folder
        return (Text(folder, None), apart) if apart else (Text(folder, "train"), Validation((Text(folder, "validation"),)))

    sources: list[tuple[str | Text, float]] = []
    parts: list[Text] = []
    excluded: list[str] = []
    for share in shares:
        text = hub_text(share.name)
        if text is None:
            folder = load_corpus([share.name], tokenizer).folder
            sources.append((Text(folder, None if apart else "train"), share.weight or 1.0))
            parts.append(Text(folder, "validation"))
            continue
        sources.append((share.name, share.weight or 1.0))
        if apart is None:
            kept = keep_documents(f"held out of {text}", lambda text=text: held_out(text), tokenizer)  # type: ignore[misc]
            parts.append(Text(kept.folder, None))
            if text.validation_split is None:
                excluded += [document.rpartition(":")[2] for document in kept.names]
    return Mixture(tuple(sources), tuple(excluded), name, seed), apart or Validation(tuple(parts))
