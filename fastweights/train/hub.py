"""Text data sets by name, streamed from the Hugging Face hub: nothing is downloaded whole, nothing but the held-out documents is kept."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastweights.train.corpus import encoder
from fastweights.train.documents import Document
from fastweights.train.tokenizer import document_token_id, load_tokenizer

HUB = "hub:"
"""What a data set's name begins with where it is not one of `HUB_TEXTS`."""
BLOCK = 1000
"""Documents that are shuffled among each other. Files are read in order: both named data sets come shuffled."""
HELD_OUT = 1000
"""Documents to validate on, the first, where a data set has no validation split."""


@dataclass(frozen=True, kw_only=True)
class HubText:
    """What `datasets.load_dataset` needs to know of a text data set."""

    repository: str
    """`owner/name`, or a local folder of parquet or jsonl files."""
    config: str | None = None
    column: str = "text"
    split: str = "train"
    validation_split: str | None = None
    """None: the first `HELD_OUT` documents of `split` are validated on, and never trained on."""

    @classmethod
    def parse(cls, source: str, *, split: str = "train") -> HubText:
        """`hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]`, NAME an `owner/name` or a folder; an empty part has its default, and ``split`` is SPLIT's.

        Raises:
            ValueError: no name, or more parts than there are.
        """
        name, *rest = source.removeprefix(HUB).split(":")
        if not source.startswith(HUB) or not name or len(rest) > 3:
            raise ValueError(f"{source!r} is not of the form hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]")
        given = {key: value for key, value in zip(("config", "split", "column"), rest, strict=False) if value}
        return cls(repository=name, **{"split": split, **given})

    def __str__(self) -> str:
        return HUB + ":".join((self.repository, self.config or "", self.split, self.column))


HUB_TEXTS = {
    "fineweb-edu": HubText(repository="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
    "slimpajama": HubText(repository="cerebras/SlimPajama-627B", validation_split="validation"),
}
"""By the name that `--data` takes."""


def hub_text(name: str) -> HubText | None:
    """The data set of a name, or None if the name is not one of the hub's."""
    if name in HUB_TEXTS:
        return HUB_TEXTS[name]
    return HubText.parse(name) if name.startswith(HUB) else None


def open_split(text: HubText, split: str) -> Any:
    """The split as a streaming `datasets.IterableDataset`.

    Raises:
        ValueError: no such data set, split or column.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(text.repository, text.config, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot stream {text.repository!r} (config {text.config!r}, split {split!r}): {error}") from error
    columns = dataset.column_names
    if columns is not None and text.column not in columns:
        raise ValueError(f"{text.repository!r} has no column {text.column!r}; it has {', '.join(columns)}")
    return dataset


def held_out(text: HubText) -> Iterator[Document]:
    """The documents to validate on; a name ends in the document's fingerprint."""
    rows = open_split(text, text.validation_split or text.split)
    for row in itertools.islice(rows, HELD_OUT):
        content = (row[text.column] or "").encode()
        yield Document(f"{text.repository}:{fingerprint(content)}", content)


def fingerprint(document: bytes) -> str:
    """By which a held-out document is known when it comes by in training."""
    return hashlib.sha256(document).hexdigest()


class HubStream:
    """The documents of a data set for one of `readers`, epoch after epoch, in blocks that are shuffled. A `TokenStream`.

    A place is the state of the data set before a block, and how many of the block's documents have been given: a resumed reader reads
    that block again and goes on inside it.
    """

    def __init__(self, text: HubText, tokenizer: str, *, seed: int, excluded: frozenset[str]) -> None:
        self.text, self.tokenizer, self.seed, self.excluded = text, tokenizer, seed, excluded

    def documents(self, reader: int, readers: int, place: dict[str, Any] | None) -> Iterator[tuple[NDArray, dict[str, Any]]]:
        from datasets.distributed import split_dataset_by_node

        tokenizer = load_tokenizer(self.tokenizer)
        encode, begin = encoder(tokenizer), document_token_id(tokenizer)
        epoch, block, state, given = (place[name] for name in ("epoch", "block", "state", "given")) if place else (0, 0, None, 0)
        while True:
            rows = split_dataset_by_node(open_split(self.text, self.text.split), rank=reader, world_size=readers)
            if state is not None:
                rows.load_state_dict(state)
            texts = self._texts(rows)
            while True:
                read = list(itertools.islice(texts, BLOCK))
                if not read:
                    break
                order = np.random.default_rng([self.seed, reader, epoch, block]).permutation(len(read))[given:]
                for number, tokens in enumerate(encode([read[i] for i in order]), start=given):
                    at = {"epoch": epoch, "block": block, "state": state, "given": number}
                    yield np.concatenate([[begin], tokens]).astype(np.int64), at
                block, given, state = block + 1, 0, copy.deepcopy(rows.state_dict())
            if block == 0:
                raise ValueError(f"{self.text.repository!r}: reader {reader} of {readers} found no document")
            epoch, block, state, given = epoch + 1, 0, None, 0

    def _texts(self, rows: Any) -> Iterator[bytes]:
        for batch in rows.iter(batch_size=1):  # iterating the rows themselves would share them out among the workers once more
            text = (batch[self.text.column][0] or "").encode()
            if text and fingerprint(text) not in self.excluded:
                yield text
