"""Memory of a benchmark: how much was in use, how much is free, how fast it is, and how much of it a token must move."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fastweights.layers.softmax import SoftmaxState
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.cache import LayerState, map_state

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMINFO = Path("/proc/meminfo")


class Peak:
    """The largest amount of memory in use inside a ``with``, in bytes; None where the system does not tell."""

    ALLOCATED, RESIDENT, UNKNOWN = "allocated by torch on the device", "resident set of the whole process", "not known on this system"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        self.kind = self.ALLOCATED if device.type == "cuda" else self.RESIDENT if CLEAR.exists() else self.UNKNOWN

    @contextmanager
    def watch(self) -> Iterator[None]:
        """May be entered again: the largest of all counts."""
        if self.kind == self.ALLOCATED:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.kind == self.RESIDENT:
            CLEAR.write_text("5")  # Linux: the high-water mark falls to what is resident now
        yield
        if self.kind == self.ALLOCATED:
            found = torch.cuda.max_memory_allocated(self.device)
        elif self.kind == self.RESIDENT:
            found = _kilobytes(STATUS, "VmHWM") * 1024
        else:
            return
        self.bytes = max(found, self.bytes or 0)


def free_bytes(device: torch.device) -> int | None:
    """What could still be taken; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return _kilobytes(MEMINFO, "MemAvailable") * 1024 if MEMINFO.exists() else None


def _kilobytes(file: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), flags=re.M)
    assert found is not None
    return int(found[1])


def measure_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, reads and writes counted; the median of seven."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        synchronise(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() / statistics.median(times[1:])


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def state_bytes(states: Sequence[LayerState]) -> int:
    found: list[int] = []

    def note(x: Tensor) -> Tensor:
        found.append(x.numel() * x.element_size())
        return x

    for state in states:
        map_state(note, state)
    return sum(found)


def weight_bytes(model: FastWeightsForCausalLM) -> int:
    """Of the weights that every token needs: all but an embedding that is not also the output projection."""
    looked_up = model.model.embed_tokens.weight
    skipped = 0 if looked_up is model.lm_head.weight else looked_up.numel() * looked_up.element_size()
    return sum(p.numel() * p.element_size() for p in model.parameters()) - skipped


def bytes_per_step(model: FastWeightsForCausalLM, states: Sequence[LayerState], batch: int) -> int:
    """What decoding a token in each of ``batch`` rows must move: the weights once; each row's memory read and written, and of softmax
    layers keys and values read."""
    memories = [state for state in states if not isinstance(state, SoftmaxState)]
    return weight_bytes(model) + batch * (state_bytes(states) + state_bytes(memories))


def needed_bytes(model: FastWeightsForCausalLM, state: int, length: int, batch: int, piece: int) -> int:
    """About what a case takes besides the weights: the state of the text and of each row, and the widest activations of a piece."""
    config = model.config
    width = 3 * config.intermediate_size + 8 * config.hidden_size
    return state * (1 + batch) + min(piece, length) * width * model.dtype.itemsize


def expected_state_bytes(model: FastWeightsForCausalLM, length: int) -> int:
    """Of one row after ``length`` tokens, without making it."""
    states = []
    with torch.device("meta"):
        for block in model.model.layers:
            window = getattr(block.mixer, "window_size", 0)  # None: all tokens; the token itself is not among those that it keeps
            slots = {} if window == 0 else {"slots": length if window is None else min(length, window - 1)}
            states.append(block.mixer.initial_state(1, device="meta", dtype=model.dtype, **slots))
    return state_bytes(states)
