"""What can be set about a look through the microscope. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

S_NIAH = "s_niah"
"""The needle that stands for a prompt made by the task of that name."""


@dataclass(kw_only=True, frozen=True)
class InspectSettings:
    """How to look.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    layers: tuple[int, ...] = ()
    """Which layers, from 0; none given is all."""
    tokens: int = 16_384
    """Tokens of the text to read, at most."""
    chunk: int = 256
    """Tokens fed at a time; rank, norm and Σ of each state are taken after every chunk."""
    stride: int = 1
    """Record every so many tokens. What is recorded is all that grows with the text."""
    top: int = 4
    """Eigenvalues of Σ to record, and key directions that needles are held against."""
    rank_tolerance: float = 1e-3
    """Singular values above this times the largest count for the numerical rank."""
    needle: str = ""
    """A sentence of the text to follow: how much of the query along its keys the read keeps, against all other keys. `s_niah`: a prompt of
    that task, with the text as its haystack (without a text, its repeated line)."""
    needle_length: int = 1024
    """Tokens of the prompt that `--needle s_niah` makes."""
    needle_depth: int = 50
    """Percent of the haystack before that needle."""
    needle_prompts: int = 1
    """How many prompts `--needle s_niah` makes, with other needles; each begins at another sentence of the text. The first is looked at
    whole, in all of them the needle."""
    depth_map: bool = False
    """Also hide needles at every length and depth, and measure how well each value is known."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Prompt lengths of the depth map, in tokens."""
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Depths of the depth map, in percent of the haystack before the needle."""
    samples: int = 8
    """Needles at each length and depth."""
    out: Path | None = None
    """Folder for results.json, tokens.npz, rows.jsonl and report.html; runs/inspect/MODEL by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""

    def __post_init__(self) -> None:
        for name in ("tokens", "chunk", "stride", "top", "needle_prompts", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.needle_prompts > 1 and self.needle != S_NIAH:
            raise ValueError(f"needle_prompts={self.needle_prompts} makes prompts for needle={S_NIAH!r}; needle is {self.needle!r}")
        if not 0 < self.rank_tolerance < 1:
            raise ValueError(f"rank_tolerance={self.rank_tolerance} is not between 0 and 1")
        if self.depth_map and not (self.lengths and self.depths):
            raise ValueError("a depth map needs at least one of lengths and one of depths")
