"""The batch that is decoded: rows of state side by side in tensors that never move and never change their size.

A sequence joins by copying its state into a row and leaves by copying it out; an idle row goes on computing, and nobody looks. Every step
is therefore the same sequence of kernels on the same addresses: on a CUDA device it is captured in a CUDA graph once and replayed, on the
CPU it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.generate.draw import Dials, draw
from fastweights.generate.passes import Passes, compiled
from fastweights.generate.sampling import Sampling
from fastweights.layers.softmax import EMPTY, SoftmaxState
from fastweights.models.cache import LayerState, map_state

FAILED = -1
"""Takes the place of a token whose logits were not all finite."""


class Launched(NamedTuple):
    """A step that was launched, and may still be under way."""

    output: Tensor
    """What the host is told of each row, on the host, once `done`."""
    done: torch.cuda.Event | None

    def read(self) -> list[int]:
        """Each row's next token, or `FAILED`; waits for it."""
        if self.done is not None:
            self.done.synchronize()
        return self.output.tolist()


class Rows:
    """``count`` rows. ``max_context``: tokens that a full softmax layer keeps of each row; memories and sliding windows need none."""

    def __init__(self, passes: Passes, count: int, max_context: int | None) -> None:
        self.passes, self.count, model = passes, count, passes.model
        if max_context is None and "softmax" in model.config.mixers and model.config.window_size is None:
            raise ValueError(
                "the model has full softmax layers, whose state grows with the text: give max_context, tokens to make room for"
            )
        self._say = compiled(say, dynamic=False) if passes.compiled else say
        device, vocabulary = model.device, model.config.vocab_size
        self.states: list[LayerState] = []
        for block in model.model.layers:
            slots = {"slots": block.mixer.window_size or max_context} if hasattr(block.mixer, "window_size") else {}
            self.states.append(block.mixer.initial_state(count, **slots))
        self.token = torch.zeros(count, 1, dtype=torch.int64, device=device)
        """What each row reads next."""
        self.seen = torch.zeros(count, vocabulary, dtype=torch.bool, device=device)
        self.dials = Dials.of(count, device)
        self.output = torch.zeros(count, dtype=torch.int64, device=device)
        self.graphs = {plain: self._capture(plain) for plain in (True, False)} if device.type == "cuda" else {}
        self.run_ahead = bool(self.graphs)
        """Does it pay to launch a step before the last one was read?"""
        with torch.inference_mode(False):  # to be written into by whoever takes a step
            self._places = [(torch.zeros(count, dtype=torch.int64, pin_memory=True), torch.cuda.Event()) for _ in self.graphs]
        """Where the host finds what two steps under way tell it, by turns."""

    def put(
        self,
        row: int,
        states: Sequence[LayerState],
        token: int,
        seen: Bool[Tensor, " vocabulary"],
        sampling: Sampling,
        seed: int,
        drawn: int,
    ) -> None:
        """Make ``row`` the sequence that has come to ``states`` (of one row) and reads ``token`` next."""
        self.put_states(row, states, token)
        self.dials.set(row, sampling, seed, drawn)
        self.seen[row] = seen.to(self.seen.device)

    def put_states(self, row: int, states: Sequence[LayerState], token: int) -> None:
        for kept, state in zip(self.states, states, strict=True):
            _put(kept, row, state)
        self.token[row] = token

    def take(self, row: int) -> list[LayerState]:
        """A copy of the row's states, as states of one row."""
        return [_take(state, row) for state in self.states]

    def clear(self) -> None:
        """All rows as they were at first."""
        for state in self.states:
            map_state(torch.zero_, state)
            if isinstance(state, SoftmaxState):
                state.key_place.fill_(EMPTY)
        self.token.zero_()

    def step(self, plain: bool) -> list[int]:
        """Every row reads its token and gets the next one, or `FAILED`. ``plain``: each row takes the likeliest."""
        return self.launch(plain).read()

    def launch(self, plain: bool) -> Launched:
        """`step` without waiting for it. At most two may be unread, as each needs a place to be told in."""
        if not self.graphs:
            self._step(plain)
            return Launched(self.output.clone(), None)
        self._places.reverse()
        output, done = self._places[0]
        with torch.cuda.device(self.token.device):
            self.graphs[plain].replay()
            output.copy_(self.output, non_blocking=True)
            done.record()
        return Launched(output, done)

    def _step(self, plain: bool) -> None:
        logits = self.passes.step_(self.token, self.states)
        drawn = None
        if not plain:
            self.seen.scatter_(1, self.token, True)
            drawn = draw(logits.float(), self.seen, self.dials)
            self.dials.drawn.add_(1)
        self._say(logits, drawn, self.token, self.output)

    def _capture(self, plain: bool) -> torch.cuda.CUDAGraph:
        """Only while no row is in use: running the step to warm it up moves all of them on."""
        with torch.cuda.device(self.token.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step(plain)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(plain)
        return graph


def say(
    logits: Float[Tensor, "R vocabulary"], drawn: Int[Tensor, " R"] | None, token: Int[Tensor, "R 1"], output: Int[Tensor, " R"]
) -> None:
    """Write down each row's next token, the likeliest if none was drawn, and what the host is told of it."""
    chosen = logits.argmax(-1) if drawn is None else drawn
    token.copy_(chosen.unsqueeze(1))
    output.copy_(chosen.where(logits.isfinite().all(-1), FAILED))


def _put(kept: LayerState, row: int, state: LayerState) -> None:
    if not isinstance(kept, SoftmaxState):
        map_state(lambda x, new: x[row].copy_(new[0]), kept, state)
        return
    assert isinstance(state, SoftmaxState)
    slots = kept.key_place.shape[1]
    slot = state.key_place[0, -slots:] % slots
    kept.key_place[row] = EMPTY
    for x, new in ((kept.keys, state.keys), (kept.values, state.values), (kept.key_place, state.key_place)):
        x[row, slot] = new[0, -slots:].to(x.device, x.dtype)
    kept.place[row] = state.place[0]


def _take(kept: LayerState, row: int) -> LayerState:
    if not isinstance(kept, SoftmaxState):
        return map_state(lambda x: x[row : row + 1].clone(), kept)
    place, slot = kept.key_place[row].sort()
    slot = slot[place != EMPTY]
    keys, values, key_place = (x[row : row + 1, slot] for x in (kept.keys, kept.values, kept.key_place))
    return SoftmaxState(keys, values, key_place, kept.place[row : row + 1].clone())
