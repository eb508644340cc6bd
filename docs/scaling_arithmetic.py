"""The tables of docs/scaling.md, from the presets and `train/flops.py`: ``python docs/scaling_arithmetic.py`` writes them into the page.

Nothing is run: models are made on the meta device, which has shapes and no numbers. What a block keeps for its backward pass is counted
there too: it is what autograd saves of the plain torch form, with matrices and activations in bfloat16.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.settings import Variant
from fastweights.recipes.train_presets import preset_run
from fastweights.train.flops import PEAKS, training_flops

PAGE = Path(__file__).with_name("scaling.md")
VOCABULARY = 32_000
WINDOW = 4096
CARD, MEMORY = "H200", 141e9
UTILISATION = 0.4
"""Assumed share of the card's peak."""
USABLE = 0.9
"""Assumed share of the card's memory; the rest is for logits, buffers and the allocator."""
RANKS = 8
SHARD = 32_768
"""Tokens of a sequence shard."""
PEERS = {"FLA's Gated DeltaNet of 0.54 B": (0.54e9, 138_800), "a Llama of 0.51 B with SDPA": (0.51e9, 113_200)}
"""(parameters, tokens a second) measured on one H200 in bf16 at 8 windows of 4,096; FLA 0.6.0, Triton 3.6, torch 2.11."""
STATE = {"weights": 4, "gradients": 4, "AdamW": 8}
"""Bytes a parameter, all in float32."""


class Plan(NamedTuple):
    name: str
    config: FastWeightsConfig
    tokens: float

    @classmethod
    def of_preset(cls, name: str) -> Plan:
        run = preset_run(name)
        shape, variant = dataclasses.asdict(run.model), Variant.parse(run.mixer)
        mixer = variant.mixer(run.model.num_hidden_layers)
        config = FastWeightsConfig(mixer=mixer, vocab_size=VOCABULARY, backend="torch", **shape, **variant.options)
        return cls(f"`{name}`", config, run.train.steps * run.train.batch_tokens)

    @classmethod
    def of_seven_billion(cls) -> Plan:
        """Heads as in the presets; 20 tokens a parameter."""
        shape = {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_heads": 32,
            "intermediate_size": 9216,
            "expand_k": 0.75,
            "expand_v": 1.5,
        }
        return cls("kla+ccq, 7 B", FastWeightsConfig(mixer="kla+ccq", vocab_size=VOCABULARY, backend="torch", **shape), 140e9)


class Needs(NamedTuple):
    """Of a model; memory in bytes."""

    parameters: int
    flops: float
    """A token of training."""
    whole: float
    """Parameters that a rank holds unsharded at a time: two blocks in bfloat16 and a third's gradient, the embedding and its gradient."""
    block: int
    """What a block keeps of a window for the backward pass."""
    blocks: int
    width: int

    @property
    def state(self) -> int:
        return sum(STATE.values()) * self.parameters

    @property
    def kept(self) -> int:
        return self.blocks * self.block

    @property
    def recomputed(self) -> int:
        """With activation checkpointing: what goes into each block in bfloat16, and one block at a time."""
        return self.blocks * 2 * self.width * WINDOW + self.block

    def windows(self, activations: int, ranks: int = RANKS) -> int:
        """That a card can work on at a time, over so many."""
        free = USABLE * MEMORY - self.state / ranks - (self.whole if ranks > 1 else 0)
        return max(0, int(free / activations))


def needs(config: FastWeightsConfig) -> Needs:
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    block, embedding = (count(part) for part in (model.model.layers[0], model.model.embed_tokens))
    flops = training_flops(model, WINDOW)
    saved = bytes_saved(model.to(torch.bfloat16).model.layers[0], config.hidden_size)
    return Needs(count(model), flops, 2.0 * (3 * block + 2 * embedding), saved, config.num_hidden_layers, config.hidden_size)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def bytes_saved(block: nn.Module, width: int) -> int:
    """What autograd saves of a window, weights excepted."""
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    saved: dict[int, Tensor] = {}  # holds them, so that no two have one address

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in weights:
            saved[x.untyped_storage()._cdata] = x
        return x

    x = torch.empty(1, WINDOW, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        block(x)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def cost(plans: Sequence[Plan], of: Sequence[Needs]) -> str:
    lines = ["| model | parameters | tokens | FLOPs a token | FLOPs in all | GPU-hours |", "|---|---|---|---|---|---|"]
    for plan, need in zip(plans, of, strict=True):
        total = need.flops * plan.tokens
        hours = total / (UTILISATION * PEAKS[CARD]) / 3600
        tokens, millions = plan.tokens / 1e9, need.parameters / 1e6
        lines.append(f"| {plan.name} | {millions:,.0f} M | {tokens:,.0f} B | {need.flops / 1e9:.2f} G | {total:.1e} | {hours:,.0f} |")
    peak = PEAKS[CARD]
    assumed = (
        f"GPU-hours are arithmetic: at {UTILISATION:.0%} of {peak / 1e12:.0f} TFLOP/s ({CARD}, dense bf16), windows of {WINDOW:,} tokens."
    )
    peers = [f"{name} {rate:,} tokens/s, {6 * size * rate / peak:.0%}" for name, (size, rate) in PEERS.items()]
    measured = f"Measured of others on one {CARD} (8 windows of 4,096, bf16; 6 FLOPs a parameter and token): {'; '.join(peers)}."
    return "\n".join([*lines, "", assumed, measured])


def memory(plans: Sequence[Plan], of: Sequence[Needs]) -> str:
    head = ["model", *STATE, "sum", f"a card of {RANKS}, sharded", "a window's activations", "with checkpointing", "windows a card"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for plan, need in zip(plans, of, strict=True):
        parts = [f"{gigabytes(size * need.parameters)}" for size in STATE.values()]
        state = [gigabytes(need.state), gigabytes(need.state / RANKS + need.whole)]
        windows = f"{need.windows(need.kept)}; {need.windows(need.recomputed)}"
        lines.append(f"| {' | '.join([plan.name, *parts, *state, gigabytes(need.kept), gigabytes(need.recomputed), windows])} |")
    held = "shards, two whole blocks in bf16, one block's gradient, the embedding and its gradient"
    below = (
        f"Sharded over {RANKS} cards, a card holds {held}. Windows of {WINDOW:,} tokens that a card of {MEMORY / 1e9:.0f} GB can work "
        f"on at a time with {USABLE:.0%} of it used: without; with checkpointing."
    )
    return "\n".join([*lines, "", below])


def messages(plans: Sequence[Plan], of: Sequence[Needs]) -> str:
    """Of sequence parallelism, a layer and shard."""
    lines = [
        f"| model | S: D | its map: M | CCQ: C, μ, w, α | convolution | sum | keys and values of {SHARD:,} tokens | more arithmetic |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plan, need in zip(plans, of, strict=True):
        with torch.device("meta"):
            mixer = plan.config.build_mixer(0)
        H, K, V = mixer.num_heads, mixer.head_k_dim, mixer.head_v_dim
        conv = 2 * (mixer.conv.size - 1) * mixer.conv.channels
        parts = [4 * H * K * V, 4 * H * K * K, 4 * H * (K * K + K + 2), conv]
        softmax = 2 * 2 * plan.config.hidden_size * SHARD
        cells = [f"{size / 1e6:.2f} MB" for size in (*parts, sum(parts))]
        again = need.blocks * H * (7 * K * V + 7 * K * K + 5 * K * K) / (need.flops / 3)
        lines.append(f"| {' | '.join([plan.name, *cells])} | {softmax / 1e6:.0f} MB | {again:.1%} |")
    below = (
        "A layer and shard, one sequence; states in float32, the rest in bf16. Keys and values: what ring attention of that width "
        "passes on. More arithmetic: the runs for D, M and CCQ's moments, as a share of the model's forward pass."
    )
    return "\n".join([*lines, "", below])


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def tables() -> dict[str, str]:
    plans = [Plan.of_preset("kla+ccq-0.4b"), Plan.of_preset("kla+ccq-1.3b"), Plan.of_seven_billion()]
    of = [needs(plan.config) for plan in plans]
    return {"cost": cost(plans, of), "memory": memory(plans, of), "messages": messages(plans, of)}


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in tables().items():
        marked = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", flags=re.S)
        page = marked.sub(lambda _, table=table: f"{table}\n", page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
