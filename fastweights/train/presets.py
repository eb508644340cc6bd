"""Settings of a run, and named ones to start from. Importing this loads nothing heavy: the command line is made from these classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class ModelSize:
    """The shape of a model, whatever its mixer."""

    hidden_size: int = 96
    """Width of the residual stream."""
    num_hidden_layers: int = 2
    """Blocks, each a mixer and an MLP."""
    num_heads: int = 3
    """Heads of the mixer."""
    intermediate_size: int = 256
    """Width of the MLP. `compare` widens it a little where a mixer has fewer parameters than another."""
    expand_k: float = 1.0
    """Key size of all heads together, relative to the width."""
    expand_v: float = 1.0
    """Value size of all heads together, relative to the width."""
    conv_size: int = 4
    """Taps of the causal convolution on queries, keys and values; 0 for none."""


SIZES: dict[str, ModelSize] = {
    "0.3m": ModelSize(),
    "1m": ModelSize(hidden_size=128, num_hidden_layers=5, num_heads=4, intermediate_size=320),
    "5m": ModelSize(hidden_size=256, num_hidden_layers=6, num_heads=4, intermediate_size=640),
    "25m": ModelSize(hidden_size=512, num_hidden_layers=8, num_heads=8, intermediate_size=1216),
}
"""Named sizes; parameters at a byte vocabulary are about what the name says."""


@dataclass(kw_only=True, frozen=True)
class TrainSettings:
    """How a model is trained: AdamW, linear warm-up, cosine decay.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    steps: int = 1000
    """Optimizer steps."""
    batch_tokens: int = 4096
    """Tokens of an optimizer step, over all devices."""
    sequence_length: int = 256
    """Tokens of a training window; memory begins anew at each window and at each document in it."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    final_learning_rate: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 for no clipping."""
    accumulation: int = 1
    """Pieces that an optimizer step is computed in, to save memory; the gradient is that of the whole batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the matrix products; weights, gates and norms stay in float32."""
    save_every: int = 100
    """Steps between checkpoints, a multiple of `log_every`; a killed run goes on from the last one."""
    log_every: int = 10
    """Steps between two points of the training curve."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "sequence_length", "accumulation", "save_every", "log_every", "learning_rate"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.save_every % self.log_every:
            raise ValueError(f"save_every={self.save_every} is not a multiple of log_every={self.log_every}")
        for name in ("final_learning_rate", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share between 0 and 1")
        if self.sequence_length < 2:
            raise ValueError("sequence_length=1 leaves nothing to predict")
        if self.batch_tokens % (self.sequence_length * self.accumulation):
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is not a whole number of windows of sequence_length={self.sequence_length}"
                f" in each of accumulation={self.accumulation} pieces"
            )
