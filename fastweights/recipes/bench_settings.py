"""What can be set about a benchmark. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastweights.train.presets import SIZES

What = Literal["prefill", "decode"]
"""Reading a prompt up to its first new token, or writing on after it."""


@dataclass(kw_only=True, frozen=True)
class BenchSettings:
    """What to measure and how often. Every 0 or empty setting chooses for the device: small on a CPU, up to a million tokens on a GPU.

    Interrupt it as you like: the same command goes on where it stopped.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    mixers: tuple[str, ...] = ()
    """Mixers to measure with random weights at `size`, besides the models; `kla+ccq,softmax` alternates layers."""
    size: str = "1m"
    """Named model size of `mixers`."""
    lengths: tuple[int, ...] = ()
    """Tokens of the prompt, or of context before the new tokens; 256 to 4K on a CPU, 4K to 1M on a GPU."""
    batches: tuple[int, ...] = ()
    """Sequences decoded side by side; 1 4 on a CPU, 1 4 16 64 256 on a GPU. Prompts are read one at a time, as the engine does."""
    new_tokens: int = 0
    """Tokens to decode in one run; 16 on a CPU, 256 on a GPU."""
    repeats: int = 7
    """Runs of each case after the warm-up; the median counts. All lengths take turns, so that what else the machine does hits all alike."""
    seconds: float = 0.0
    """After so long no further repeats of a group of cases are begun; 5 on a CPU, 120 on a GPU. Each case is run once at least."""
    chunk: int = 0
    """Tokens of a prompt read at a time; the engine's default, and a whole prompt with full softmax attention, which is faster at that."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether the engine compiles the model (torch.compile), before any timing; `auto` does on a GPU."""
    generate: bool = True
    """Also decode by `model.generate`."""
    bandwidth: float = 0.0
    """Memory bandwidth in GB/s for the floor; 0 measures it by a copy."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the weights; `auto` keeps what a folder holds, and makes random ones fp32 on a CPU, bf16 on a GPU."""
    seed: int = 0
    """Draws weights and tokens."""
    out: Path = Path("runs/bench")
    """Folder; rows (results.jsonl), results.json and report.html go into OUT/prefill or OUT/decode."""
    restart: bool = False
    """Measure anew what earlier runs left in the folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size {self.size!r} is not one of {', '.join(SIZES)}")
        for name, least in (("lengths", 2), ("batches", 1)):
            given = getattr(self, name)
            if any(value < least for value in given) or len(set(given)) < len(given):
                raise ValueError(f"{name}={list(given)}: each must be at least {least}, and none given twice")
        for name in ("new_tokens", "seconds", "chunk", "bandwidth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} is not positive")
