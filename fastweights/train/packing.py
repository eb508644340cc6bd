"""Batches as a pure function of (corpus, settings, batch number): that is the whole state, so resuming is starting at a number.

An epoch lays all documents end to end in an order drawn from (seed, epoch), cuts the stream into windows of `sequence_length` tokens,
and feeds the windows in an order drawn from (seed, epoch) too. A batch is one packed row of windows. Memory and convolution begin anew
at each document *and* at each window, so the windows of a batch do not see each other; `carry` has another order, and memory that goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastweights.train.corpus import Corpus

IGNORE = -100
"""The label of a token that nothing before it predicts: the first of each document and of each window."""


class PackedRow(TypedDict):
    """One packed row, T = windows · sequence_length."""

    input_ids: Tensor
    """``[1, T]`` int64."""
    labels: Tensor
    """``[1, T]``, not shifted, as transformers' models take them; `IGNORE` at the first token of each document and window."""
    position_ids: Tensor
    """``[1, T]``: each token's place since the last reset."""
    cu_seqlens: Tensor
    """``[segments + 1]`` int32: where the segments begin, and T."""


def packed_row(pieces: Sequence[NDArray]) -> PackedRow:
    """One row of pieces of documents, none empty, each a segment of its own."""
    input_ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    cu_seqlens = torch.tensor([0, *np.cumsum([len(piece) for piece in pieces])], dtype=torch.int32)
    first = cu_seqlens[:-1].long()
    labels = input_ids.clone()
    labels[first] = IGNORE
    position_ids = torch.arange(len(input_ids)) - first.repeat_interleave(cu_seqlens.diff())
    return PackedRow(input_ids=input_ids[None], labels=labels[None], position_ids=position_ids[None], cu_seqlens=cu_seqlens)


class PackedBatches(Dataset):
    """`batches[i]` is this rank's i-th packed row. Ranks take turns, so the windows of a step do not depend on the number of ranks.

    Args:
        sequence_length: tokens of a window.
        windows: windows of a batch.
        count: batches in all; they run over as many epochs as that takes.

    Raises:
        ValueError: the corpus has less than one window.
    """

    def __init__(
        self, corpus: Corpus, *, sequence_length: int, windows: int, count: int, seed: int = 0, rank: int = 0, ranks: int = 1
    ) -> None:
        self.corpus, self.sequence_length, self.windows, self.count = corpus, sequence_length, windows, count
        self.seed, self.rank, self.ranks = seed, rank, ranks
        self.windows_per_epoch = corpus.total // sequence_length
        """What is left of the stream, less than a window, is left out: another epoch, another rest."""
        if self.windows_per_epoch < 1:
            raise ValueError(f"{corpus.total} tokens of text do not fill one window of sequence_length={sequence_length}")
        self._orders: dict[int, tuple[NDArray, NDArray, NDArray]] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, batch: int) -> PackedRow:
        if not 0 <= batch < self.count:
            raise IndexError(batch)
        return packed_row(
            [
                self.corpus[document][begin:end]
                for epoch, window in self._window_numbers(batch)
                for document, begin, end in self._pieces(epoch, window)
            ]
        )

    def describe(self, batch: int) -> str:
        """Which text a batch is made of, for messages: epoch, window and documents, of every window."""
        lines = []
        for epoch, window in self._window_numbers(batch):
            pieces = [f"{self.corpus.names[document]}[{begin}:{end}]" for document, begin, end in self._pieces(epoch, window)]
            lines.append(f"epoch {epoch}, window {window}: {', '.join(pieces)}")
        return "\n".join(lines)

    def _window_numbers(self, batch: int) -> list[tuple[int, int]]:
        first = (batch * self.ranks + self.rank) * self.windows
        return [self._window(number) for number in range(first, first + self.windows)]

    def _window(self, number: int) -> tuple[int, int]:
        """(epoch, window in it) of the windows that all ranks are fed, by number."""
        epoch, place = divmod(number, self.windows_per_epoch)
        return epoch, int(self._order(epoch)[2][place])

    def _pieces(self, epoch: int, window: int) -> list[tuple[int, int, int]]:
        """The (document, begin, end) that a window is made of."""
        documents, ends, _ = self._order(epoch)
        place, stop = window * self.sequence_length, (window + 1) * self.sequence_length
        pieces = []
        at = int(np.searchsorted(ends, place, side="right"))
        while place < stop:
            document, end = int(documents[at]), int(ends[at])
            start = end - int(self.corpus.lengths[document])
            pieces.append((document, place - start, min(stop, end) - start))
            place = min(stop, end)
            at += 1
        return pieces

    def _order(self, epoch: int) -> tuple[NDArray, NDArray, NDArray]:
        """(documents in the order of the stream, where each ends in it, windows in the order they are fed)."""
        if epoch not in self._orders:
            random = np.random.default_rng([self.seed, epoch])
            documents = random.permutation(len(self.corpus))
            ends = np.cumsum(self.corpus.lengths[documents])
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}  # a batch may reach over an epoch's end
            self._orders[epoch] = documents, ends, random.permutation(self.windows_per_epoch)
        return self._orders[epoch]
