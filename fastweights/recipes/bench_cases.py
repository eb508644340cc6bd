"""What is timed: reading a prompt, and decoding after one, by the engine's own rows, by the engine, and by ``model.generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastweights.generate import Engine, Sampling, Snapshot
from fastweights.generate.reading import Reading, default_chunk
from fastweights.generate.snapshot import describe
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models.cache import LayerState
from fastweights.models.modeling import CACHE
from fastweights.recipes.bench_memory import Peak, synchronise

PATHS = ("rows", "engine", "generate")
"""Of decoding: the engine's step alone, a CUDA graph on a GPU; the whole engine, requests and all; transformers' generate."""


class Case(NamedTuple):
    """One number to measure, and one row."""

    length: int
    batch: int
    path: str


class Bench:
    """One model, and what of it is kept from one case to the next."""

    def __init__(self, model: FastWeightsForCausalLM, chunk: int, new_tokens: int, seed: int, compile: bool = False) -> None:
        self.model, self.device, self.new_tokens, self.compile = model, model.device, new_tokens, compile
        self.full_softmax = "softmax" in model.config.mixers and model.config.window_size is None
        self._chunk = chunk
        self._random = torch.Generator().manual_seed(seed)
        self._states: dict[int, list[LayerState]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._engine: tuple[tuple, Engine] | None = None

    def forget(self) -> None:
        """Free all but the model."""
        self._states.clear()
        self._engine = None

    def chunk(self, length: int) -> int:
        if self._chunk:
            return self._chunk
        if self.full_softmax:
            return length + 1
        return default_chunk(self.device)

    def prepare(self, case: Case) -> list[LayerState]:
        """Make what the case begins from, outside of any timing; the states after its text."""
        self.engine(case)
        if case.length not in self._states:
            reading = Reading(self.engine(case).passes, self.chunk(case.length), np.array([*self.tokens(case.length), 0]))
            while reading.go_on():
                pass
            self._states[case.length] = reading.states
        return self._states[case.length]

    def run(self, case: Case, peak: Peak) -> dict[str, float]:
        """Milliseconds by name: of the case's prompt, or of one decoding step."""
        run: dict[str, Callable[[Case], dict[str, float]]] = {
            "prompt": self._prompt,
            "rows": self._rows,
            "engine": self._requests,
            "generate": self._generate,
        }
        with peak.watch():
            return run[case.path](case)

    def engine(self, case: Case) -> Engine:
        """One that fits; the last one where it does."""
        room = case.length + 2 * self.new_tokens + case.batch + 4 if self.full_softmax else None
        key = (case.batch, self.chunk(case.length), room)
        if self._engine is None or self._engine[0] != key:
            self._engine = None  # free it before the next takes its place
            rows, chunk = case.batch, self.chunk(case.length)
            engine = Engine(self.model, rows=rows, queue=rows, prefill_chunk=chunk, max_context=room, compile=self.compile)
            engine.fingerprint = "a benchmark's"  # type: ignore[misc]  # nothing is saved, so nobody need read all weights
            self._engine = key, engine
        return self._engine[1]

    def tokens(self, count: int) -> list[int]:
        """Random, and the same whenever so many are asked for."""
        if count not in self._prompts:
            self._prompts[count] = torch.randint(self.model.config.vocab_size, (count,), generator=self._random).tolist()
        return self._prompts[count]

    def _prompt(self, case: Case) -> dict[str, float]:
        tokens, chunk = self.tokens(case.length), self.chunk(case.length)
        with self._timed() as reading:
            read = Reading(self.engine(case).passes, chunk, np.array(tokens))
            while read.go_on():
                pass
        del read
        with self._timed() as first:
            done = self.engine(case).submit(tokens, Sampling(max_new_tokens=1, ignore_eos=True)).result()
        if done.error is not None:
            raise done.error
        return {"ms": first.ms, "cpu_ms": first.cpu_ms, "reading_ms": reading.ms}

    def _rows(self, case: Case) -> dict[str, float]:
        states, rows = self._states[case.length], self.engine(case).rows
        seen = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        with torch.inference_mode():
            for row, token in enumerate(self.tokens(case.batch)):
                rows.put(row, states, token, seen, Sampling(), 0, 0)
            with self._timed() as steps:
                for _ in range(self.new_tokens):
                    rows.step(plain=True)
        return {"ms": steps.ms / self.new_tokens, "cpu_ms": steps.cpu_ms / self.new_tokens}

    def _requests(self, case: Case) -> dict[str, float]:
        engine, seen = self.engine(case), torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
        memory = Snapshot(
            tuple(self._states[case.length]), case.length, (self.tokens(case.length)[-1],), seen, engine.fingerprint, describe(self.model)
        )
        sampling = Sampling(max_new_tokens=self.new_tokens + case.batch, ignore_eos=True)
        requests = [engine.submit([token], sampling, after=memory) for token in self.tokens(case.batch)]
        try:
            while not all(request.tokens for request in requests) and engine.step():
                pass
            with self._timed() as steps:
                for _ in range(self.new_tokens - 1):
                    engine.step()
        finally:
            for request in requests:
                request.cancel()
        for request in requests:
            if (error := request.result().error) is not None:
                raise error
        return {"ms": steps.ms / (self.new_tokens - 1), "cpu_ms": steps.cpu_ms / (self.new_tokens - 1)}

    def _generate(self, case: Case) -> dict[str, float]:
        cache = FastWeightsCache(self.model.config)
        cache.states, cache.seen_tokens = list(self._states[case.length]), case.length
        cache = cache.copy()
        cache.batch_repeat_interleave(case.batch)
        text = torch.tensor(self.tokens(case.length)).expand(case.batch, -1)
        ids = torch.cat([text, torch.tensor(self.tokens(case.batch)).unsqueeze(1)], dim=1).to(self.device)
        how = {"min_new_tokens": self.new_tokens, "max_new_tokens": self.new_tokens, "do_sample": False, "pad_token_id": 0}
        with self._timed() as steps:
            self.model.generate(ids, attention_mask=torch.ones_like(ids), **how, **{CACHE: cache})
        return {"ms": steps.ms / self.new_tokens, "cpu_ms": steps.cpu_ms / self.new_tokens}

    def _timed(self) -> _Timed:
        return _Timed(self.device)


class _Timed:
    """Milliseconds inside a ``with``, all that the device was given to do included; and those that this process had a processor."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ms, self.cpu_ms = device, 0.0, 0.0

    def __enter__(self) -> _Timed:
        synchronise(self.device)
        self.ms, self.cpu_ms = -1e3 * time.perf_counter(), -1e3 * time.process_time()
        return self

    def __exit__(self, *_) -> None:
        synchronise(self.device)
        self.ms, self.cpu_ms = self.ms + 1e3 * time.perf_counter(), self.cpu_ms + 1e3 * time.process_time()


def is_out_of_memory(error: BaseException) -> bool:
    """Torch tells of it by several types."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("not enough memory" in str(error) or "out of memory" in str(error))
    )


def groups(full_softmax: bool, what: str, lengths: Sequence[int], batches: Sequence[int], paths: Sequence[str]) -> list[list[Case]]:
    """Cases that take turns. A growing state is measured alone: what it takes must not be what another length finds missing."""
    found = []
    for batch in (1,) if what == "prefill" else batches:
        for group in [[length] for length in lengths] if full_softmax else [list(lengths)]:
            found.append([Case(length, batch, path) for length in group for path in (("prompt",) if what == "prefill" else paths)])
    return found
