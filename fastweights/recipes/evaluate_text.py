"""Texts for length curves: any local file or folder, or a data set of the Hugging Face hub by name; tokenised, and long enough."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from fastweights.evaluate.harness.tasks import Unavailable, quiet
from fastweights.train.corpus import encoder
from fastweights.train.documents import Document, read_documents, source_files
from fastweights.train.hub import HUB, HubText
from fastweights.train.tokenizer import document_token_id


@dataclass(frozen=True)
class TokenisedText:
    """Documents that all hold the longest context and one token more."""

    documents: list[NDArray]
    bytes_per_token: NDArray[np.float64]
    """Of each document ``[documents]``."""
    joined: bool
    """Whether shorter documents had to be joined, in the order of the text."""
    sha256: str
    """Of the text, so that a result says what it was measured on."""


def read_texts(source: str | HubText) -> Iterator[Document]:
    """The documents of a source.

    Raises:
        Unavailable: it cannot be read or fetched.
    """
    try:
        if isinstance(source, HubText) or source.startswith(HUB):
            yield from _hub_texts(source if isinstance(source, HubText) else HubText.parse(source, split="test"))
        else:
            for file in source_files([source]):
                yield from read_documents(file)
    except (OSError, ValueError) as error:
        raise Unavailable(" ".join(str(error).split())[:300]) from error


def tokenise(source: str | HubText, tokenizer: PreTrainedTokenizerBase, *, longest: int, tokens: int) -> TokenisedText:
    """Documents of a source with at least ``longest + 1`` tokens; if those hold fewer than ``tokens``, all are joined to such.

    Raises:
        Unavailable: the source cannot be read, or is too short as a whole.
    """
    try:
        begin = document_token_id(tokenizer)
    except ValueError as error:
        raise Unavailable(str(error)) from error
    digest, encode = hashlib.sha256(), encoder(tokenizer)
    found: list[tuple[NDArray, int]] = []
    for document in read_texts(source):
        if not document.text:  # it has no byte to predict; data sets of lines have many such
            continue
        digest.update(document.text)
        ids = encode([document.text])[0]
        found.append((np.concatenate([[begin], np.asarray(ids, np.int64)]), len(document.text)))
    if not found:
        raise Unavailable(f"there is no text in {source}: it is empty, or all of its documents are")
    long = [pair for pair in found if len(pair[0]) > longest]
    joined = sum(len(ids) for ids, _ in long) < min(tokens, sum(len(ids) for ids, _ in found))
    if joined:
        long = list(_joined(found, longest))
    if not long:
        total = sum(len(ids) for ids, _ in found)
        raise Unavailable(f"{source} has {total:,} tokens in all; a context of {longest:,} needs one more than that")
    rates = np.array([size / max(1, len(ids) - 1) for ids, size in long])
    return TokenisedText([ids for ids, _ in long], rates, joined, digest.hexdigest())


def _joined(found: Sequence[tuple[NDArray, int]], longest: int) -> Iterator[tuple[NDArray, int]]:
    """Neighbours in one, each as soon as it is long enough; what is left over at the end is not enough for a window."""
    pieces: list[NDArray] = []
    size = length = 0
    for ids, own_size in found:
        pieces.append(ids)
        length, size = length + len(ids), size + own_size
        if length > longest:
            yield np.concatenate(pieces), size
            pieces, length, size = [], 0, 0


def _hub_texts(text: HubText) -> Iterator[Document]:
    import datasets

    try:
        with quiet():
            rows = datasets.load_dataset(text.repository, text.config, split=text.split)
    except datasets.exceptions.DatasetsError as error:
        raise ValueError(f"{text} cannot be fetched: {error}") from error
    if text.column not in rows.column_names:
        raise ValueError(f"{text} has no column {text.column!r}; it has {', '.join(rows.column_names)}")
    for number, content in enumerate(rows[text.column]):
        yield Document(f"{text.repository}:{number}", (content or "").encode())
