"""Memory carried over from window to window: back-propagation through long documents, truncated at the windows.

The windows of a step are its *lanes*. In each epoch a lane reads a stretch of the text in order, one window a step, so a window that
begins in the middle of a document can begin with the memory, convolution and place that the window before left, as numbers without
gradients. Which windows a step has depends on its number alone, and what they begin with on the steps before: a checkpoint holds that, a
file for each rank.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fastweights.models import FastWeightsCache, FastWeightsConfig
from fastweights.models.cache import LayerState, map_state
from fastweights.notation import CCQState, MemoryState
from fastweights.train.corpus import Corpus
from fastweights.train.packing import PackedBatches, PackedRow
from fastweights.train.presets import TrainSettings


class LaneRow(PackedRow):
    """A packed row whose windows may go on with documents."""

    continued: Tensor
    """bool ``[windows]``: the window begins inside a document, and its lane has just read what comes before."""


class LaneBatches(PackedBatches):
    """Batches whose n-th window goes on where the n-th of the same piece of the step before ended, as long as an epoch lasts.

    What does not fill a window in each lane, at the end of an epoch, is left out: another epoch, another rest.

    Args:
        lanes: windows of a step, over all its pieces and ranks; what else is that of `PackedBatches`.

    Raises:
        ValueError: the corpus has less than a window for each lane.
    """

    def __init__(self, corpus: Corpus, *, lanes: int, **cut: Any) -> None:
        super().__init__(corpus, **cut)
        self.lanes, self.windows_per_lane = lanes, self.windows_per_epoch // lanes
        if self.windows_per_lane < 1:
            raise ValueError(
                f"carry_memory=True: {corpus.total} tokens of text do not fill one window of sequence_length={self.sequence_length} in "
                f"each of {lanes} lanes (batch_tokens / sequence_length)"
            )

    def __getitem__(self, batch: int) -> LaneRow:
        windows = self._window_numbers(batch)
        continued = [window % self.windows_per_lane > 0 and self._pieces(epoch, window)[0][1] > 0 for epoch, window in windows]
        return LaneRow(**super().__getitem__(batch), continued=torch.tensor(continued))

    def _window(self, number: int) -> tuple[int, int]:
        step, lane = divmod(number, self.lanes)
        epoch, place = divmod(step, self.windows_per_lane)
        return epoch, lane * self.windows_per_lane + place


def batches_of(corpus: Corpus, settings: TrainSettings, *, seed: int = 0, rank: int = 0, ranks: int = 1) -> PackedBatches:
    """A rank's rows of a whole run, one for each piece of each step.

    Raises:
        ValueError: too little text.
    """
    lanes = settings.batch_tokens // settings.sequence_length
    cut: dict[str, int] = {"sequence_length": settings.sequence_length, "windows": lanes // (settings.accumulation * ranks)}
    cut |= {"count": settings.steps * settings.accumulation, "seed": seed, "rank": rank, "ranks": ranks}
    return LaneBatches(corpus, lanes=lanes, **cut) if settings.carry_memory else PackedBatches(corpus, **cut)


class CarriedMemory:
    """What the windows of this rank leave to those after them.

    Args:
        pieces: rows of a step, which come in turn.
    """

    def __init__(self, config: FastWeightsConfig, *, sequence_length: int, pieces: int) -> None:
        self.config, self.sequence_length = config, sequence_length
        self._left: deque[list[LayerState | None]] = deque([[None] * config.num_hidden_layers for _ in range(pieces)])
        """The states that each row left, the longest ago first: a row a window, after its last token."""
        self._last = torch.empty(0, dtype=torch.int64)

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:
        """The model's arguments for a row of `LaneBatches`: with a cache that holds what each of its segments begins with."""
        inputs = {name: value for name, value in row.items() if name != "continued"}
        segments = len(row["cu_seqlens"]) - 1
        first = torch.searchsorted(row["cu_seqlens"], torch.arange(0, int(row["cu_seqlens"][-1]), self.sequence_length))
        self._last = torch.cat([first[1:], torch.tensor([segments])]) - 1
        left, cache = self._left.popleft(), FastWeightsCache(self.config)
        if row["continued"].any():
            window, segment = row["continued"].nonzero()[:, 0], first[row["continued"]]

            def hand_on(x: Tensor) -> Tensor:  # all else begins from zeros, as every layer's first state is
                return x.new_zeros(segments, *x.shape[1:]).index_copy_(0, segment.to(x.device), x[window.to(x.device)])

            cache.states = [map_state(hand_on, state) for state in left]
        return inputs | {"cache": cache}

    def end(self, cache: FastWeightsCache) -> None:
        """Take what the row's windows leave, after the backward pass."""
        self._left.append([map_state(lambda x: x.detach()[self._last.to(x.device)], state) for state in cache.states])

    def save(self, file: Path, ranks: int) -> None:
        torch.save({"ranks": ranks, "left": list(self._left)}, file)

    def load(self, file: Path, device: torch.device) -> int:
        """Go on from what was saved; returns by how many ranks it was."""
        with torch.serialization.safe_globals([MemoryState, CCQState]):
            saved = torch.load(file, map_location="cpu", weights_only=True)
        self._left = deque([map_state(lambda x: x.to(device), state) for state in left] for left in saved["left"])
        return saved["ranks"]


def check_carry(config: PreTrainedConfig, *, by_number: bool) -> None:
    """Can memory be carried over in a model, on text whose windows are (not) known by their numbers?

    Raises:
        ValueError: no; the message says why.
    """
    if not isinstance(config, FastWeightsConfig):
        raise ValueError(f"carry_memory=True is for fastweights models, and this is a {config.model_type}")
    if "softmax" in config.mixers:
        raise ValueError(
            f"carry_memory=True: softmax layers (mixer={config.mixer!r}) have no memory to hand on but all keys and values of a document"
        )
    if not by_number:
        raise ValueError("carry_memory=True is for files and folders alone: lanes of streamed or mixed text cannot be resumed yet")
