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
    """Heads of the mixer; of its keys where `num_value_heads` is given."""
    num_value_heads: int | None = None
    """Value heads, a multiple of `num_heads`, which then share keys; none given: as many."""
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
    "60m": ModelSize(hidden_size=640, num_hidden_layers=12, num_heads=10, intermediate_size=1536),
    "125m": ModelSize(hidden_size=768, num_hidden_layers=18, num_heads=12, intermediate_size=1728),
    "0.4b": ModelSize(hidden_size=1536, num_hidden_layers=11, num_heads=12, intermediate_size=6144, expand_k=0.75, expand_v=1.5),
    "500m": ModelSize(hidden_size=1280, num_hidden_layers=20, num_heads=10, intermediate_size=3392, expand_k=0.75, expand_v=1.5),
    "1.3b": ModelSize(hidden_size=2048, num_hidden_layers=21, num_heads=16, intermediate_size=5440, expand_k=0.75, expand_v=1.5),
}
"""Named sizes. Up to 125m, parameters at a byte vocabulary are about what the name says; above, those of 32,000 pieces.

0.4b is the shape of KLA's "0.4B" models (arXiv 2605.08587): 468 M parameters and 49 M of embeddings. 500m and 1.3b have the sizes of CCQ's
models (arXiv 2606.01294), whose shapes are not among our facts: ours keep KLA's heads, K = 96 and V = 192.
"""


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
    carry_memory: bool = False
    """Let a window that begins inside a document begin with the memory that the window before it left, without that one's gradients:
    each window of a step is then a lane, which reads text in order. For files and folders, and models without softmax layers."""
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
    sharding: Literal["ddp", "fsdp2"] = "ddp"
    """Of several processes, `ddp` keeps the whole model in each; `fsdp2` shares out weights, gradients and AdamW's moments over them."""
    workers: int = 0
    """Processes a device that read and tokenise ahead, of text that is streamed or mixed; 0 reads between the steps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the matrix products; weights, gates and norms stay in float32."""
    activation_checkpointing: bool = False
    """Keep only what goes into each block, and compute the rest again in the backward pass: less memory, a third more arithmetic."""
    compile: bool = False
    """torch.compile the layers, whose small operations then run together; once for all layers of a kind, at the first step."""
    spike: float = 0.0
    """Stop before a step whose loss is more than this many times the median of the last 100; 0 for never."""
    save_every: int = 100
    """Steps between checkpoints, a multiple of `log_every`; a killed run goes on from the last one."""
    keep_checkpoints: int = 2
    """The newest checkpoints that are kept."""
    log_every: int = 10
    """Steps between two points of the training curve."""

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch_tokens", "sequence_length", "accumulation", "learning_rate"),
            *("save_every", "keep_checkpoints", "log_every"),
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not positive")
        if self.save_every % self.log_every:
            raise ValueError(f"save_every={self.save_every} is not a multiple of log_every={self.log_every}")
        for name in ("final_learning_rate", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share between 0 and 1")
        for name in ("workers", "clip", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")
        if self.spike != 0 and not self.spike > 1:
            raise ValueError(f"spike={self.spike} is neither 0 nor above 1: every other step would be a spike")
        if self.sequence_length < 2:
            raise ValueError("sequence_length=1 leaves nothing to predict")
        if self.compile and self.sharding == "fsdp2":
            raise ValueError("compile=True with sharding='fsdp2': a model in shards is not compiled; leave one of them out")
        if self.batch_tokens % (self.sequence_length * self.accumulation):
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is not a whole number of windows of sequence_length={self.sequence_length}"
                f" in each of accumulation={self.accumulation} pieces"
            )
