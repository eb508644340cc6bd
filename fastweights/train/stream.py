"""Mixtures, and text that is read as it comes: packed as `packing` packs it, resumed from a place that travels with every row.

The readers of a run are ranks · workers. Each has documents and an order of its own, and takes the windows of a row from the sources by
their weights. So what a run reads depends on the seed and on the number of readers, and on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from fastweights.train.corpus import Corpus
from fastweights.train.packing import packed_row

ROUND = 1000
"""Windows after which each source has had exactly its share, to a thousandth."""

Place = dict[str, Any]
"""Where a reader is. Plain data, written as JSON into checkpoints."""


@runtime_checkable  # the shape checker of the tests asks
class TokenStream(Protocol):
    """Documents without end."""

    def documents(self, reader: int, readers: int, place: Place | None) -> Iterator[tuple[NDArray, Place]]:
        """(tokens, the place in front of them), from `place` on; None is the beginning. Readers have no document in common."""


class Stream(NamedTuple):
    """What a run reads: sources, and the share of the windows that each gives."""

    sources: Sequence[TokenStream]
    weights: Sequence[float]


class CorpusStream:
    """A cached corpus as a `TokenStream`: every epoch in another order."""

    def __init__(self, corpus: Corpus, *, seed: int) -> None:
        self.corpus, self.seed = corpus, seed

    def documents(self, reader: int, readers: int, place: Place | None) -> Iterator[tuple[NDArray, Place]]:
        epoch, first = (place["epoch"], place["document"]) if place else (0, 0)
        while True:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.corpus))[reader::readers]
            if not len(order):
                raise ValueError(f"{len(self.corpus)} documents are too few for {readers} readers")
            for number in range(first, len(order)):
                yield self.corpus[int(order[number])].astype(np.int64), {"epoch": epoch, "document": number}
            epoch, first = epoch + 1, 0


class StreamRows(IterableDataset):
    """This rank's packed rows, without end. Besides a `PackedRow`'s tensors a row has `reader`, and `place`: JSON to go on from after it.

    Args:
        workers: of the DataLoader; 0 reads in the training process.
        fed: rows that this rank has used, by `places`: what each of its readers gave with its last row.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        sequence_length: int,
        windows: int,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        fed: int = 0,
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.stream, self.sequence_length, self.windows, self.seed = stream, sequence_length, windows, seed
        self.rank, self.ranks, self.workers = rank, ranks, max(1, workers)
        self.fed, self.places = fed, dict(places or {})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        # The DataLoader takes turns among its workers, beginning with the first; the readers go on with whose turn it was.
        reader = self.rank * self.workers + (self.fed + (worker.id if worker else 0)) % self.workers
        place = json.loads(self.places.get(str(reader), "null")) or {"window": 0, "sources": [None] * len(self.stream.sources)}
        cuts = [self._windows(source, reader, at) for source, at in zip(self.stream.sources, place["sources"], strict=True)]
        while True:
            pieces: list[NDArray] = []
            for _ in range(self.windows):
                chosen = int(_round(tuple(self.stream.weights), self.seed, reader, place["window"] // ROUND)[place["window"] % ROUND])
                window, place["sources"][chosen] = next(cuts[chosen])
                pieces += window
                place["window"] += 1
            yield packed_row(pieces) | {"reader": str(reader), "place": json.dumps(place)}

    def _windows(self, source: TokenStream, reader: int, place: Place | None) -> Iterator[tuple[list[NDArray], Place]]:
        """(pieces of documents that fill a window, the place after it)."""
        offset, at = (place["offset"], place["document"]) if place else (0, None)
        pieces, missing = [], self.sequence_length
        for tokens, before in source.documents(reader, self.ranks * self.workers, at):
            while offset < len(tokens):
                pieces.append(tokens[offset : offset + missing])
                offset += len(pieces[-1])
                missing -= len(pieces[-1])
                if missing == 0:
                    yield pieces, {"document": before, "offset": offset}
                    pieces, missing = [], self.sequence_length
            offset = 0


@lru_cache(maxsize=64)
def _round(weights: tuple[float, ...], seed: int, reader: int, number: int) -> NDArray[np.int64]:
    """Which source each of the `ROUND` windows of a round is from: whole numbers of each, in an order drawn for the round."""
    shares = np.array(weights) / sum(weights) * ROUND
    counts = shares.astype(np.int64)
    counts[np.argsort(counts - shares)[: ROUND - counts.sum()]] += 1  # those that rounding down took most from
    return np.random.default_rng([seed, reader, number]).permutation(np.repeat(np.arange(len(weights)), counts))
