"""A training step that is done over and over on batches of few shapes: on a GPU on a stream of its own, and as a CUDA graph.

A small model's step is some hundred kernels of a few microseconds, and the host takes longer to launch them than the GPU to run them. As a
graph the whole step is one launch. Steps of several models, each on its own stream, then run side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Repeated:
    """``step(kind, numbers)`` again and again. Steps of one kind launch the same kernels, on ``numbers`` of the same shape.

    With ``graphs`` the first step of a kind runs as it is, so that kernels are compiled and libraries get their workspaces; the second is
    recorded, and from then on it is replayed. So all that a step reads and writes must stay where it is: parameters, what the optimizer
    keeps (``capturable=True``), a learning rate and sums that are tensors on the device. Nothing in it may wait for the device. A step that
    cannot be recorded is said so in a warning, and all steps go on without graphs.
    """

    def __init__(self, step: Callable[[Any, Tensor], None], device: str, *, graphs: bool) -> None:
        self.step, self.device, self.graphs = step, device, graphs
        self.met: set[Any] = set()
        """Kinds that have run."""
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """Of a kind its graph, and where that reads its numbers."""
        self.stream, self.pool = None, None
        if device == "cuda":
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
        if graphs:
            self.pool = torch.cuda.graph_pool_handle()  # one for all kinds: they never run at once, and leave nothing for each other

    def on(self) -> AbstractContextManager:
        """Where the steps run. What else touches what they touch must run there too, or after a value was read there."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def __call__(self, kind: Any, numbers: Tensor) -> None:
        """One step on ``numbers``, which lie on the CPU. Does not wait for it."""
        if self.device == "cuda":
            numbers = numbers.pin_memory()  # a copy from anywhere else would wait for the steps before
        with self.on():
            if self.graphs and kind in self.met and kind not in self.recorded:
                self._record(kind, numbers)
            self.met.add(kind)
            if kind in self.recorded:
                graph, place = self.recorded[kind]
                place.copy_(numbers, non_blocking=True)
                graph.replay()
            else:
                self.step(kind, numbers.to(self.device, non_blocking=True))

    def _record(self, kind: Any, numbers: Tensor) -> None:
        place = numbers.to(self.device, non_blocking=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                self.step(kind, place)
        except Exception as error:  # whatever it is, it comes again below if it has nothing to do with recording
            first: BaseException = error
            while first.__context__ is not None:  # ending a failed recording fails too
                first = first.__context__
            warnings.warn(f"steps run without CUDA graphs, as one could not be recorded: {first}", RuntimeWarning, stacklevel=2)
            self.graphs = False
        else:
            self.recorded[kind] = graph, place
