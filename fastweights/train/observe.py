"""What the gates of a model do on real text: write strength, decay and CCQ's λ, by layer.

Looked at in a forward pass of its own, without gradients, on the first window of a logged step: the step itself is left as it is,
and nothing in it waits for these numbers. The pass is never compiled: where the step is, that would be a second time, for one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.layers import FastWeightAttention

Inputs = dict[str, Any]
"""Of a model's forward."""


def first_window(inputs: Inputs, sequence_length: int) -> Inputs:
    """The first window of a packed row that has one cu_seqlens; with what it begins with, if the row has a cache of that."""
    bounds = inputs["cu_seqlens"][inputs["cu_seqlens"] <= sequence_length]
    window = {"input_ids": inputs["input_ids"][:, :sequence_length], "cu_seqlens": bounds}
    if "cache" in inputs:
        window["cache"] = inputs["cache"].copy()
        window["cache"].batch_select_indices(torch.arange(len(bounds) - 1))
    return window


@torch.no_grad()
def observe(model: nn.Module, inputs: Inputs) -> dict[str, float]:
    """Mean, least and most of each gate over tokens and heads, under names such as `layer02/decay_min`.

    beta (of KLA it is η; 1 where a rule writes in full), decay a = exp(log_decay), lambda, and lambda_trace_max, the largest λ·tr Σ: the
    read contracts while that is at most 2. What a layer does not have is left out.
    """
    layers = [module for module in model.modules() if isinstance(module, FastWeightAttention)]
    training = model.training
    with _recording(layers) as seen, torch.compiler.set_stance("force_eager"):
        model.eval()
        model(**inputs, use_cache=False, logits_to_keep=1)
        model.train(training)
    numbers = {name: number for layer, gates in enumerate(seen) for name, number in _statistics(f"layer{layer:02d}", gates)}
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)) if numbers else {}


def _statistics(layer: str, gates: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, values in gates.items():
        if name == "lambda_trace":
            yield f"{layer}/{name}_max", values.double()
        else:
            yield from ((f"{layer}/{name}_{what}", number) for what, number in zip(("mean", "min", "max"), _range(values), strict=True))


def _range(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.double().mean(), x.double().amin(), x.double().amax()


@contextmanager
def _recording(layers: list[FastWeightAttention]) -> Iterator[list[dict[str, Tensor]]]:
    """What the rules of each layer give while the context lasts."""
    seen: list[dict[str, Tensor]] = [{} for _ in layers]

    def write(gates: dict[str, Tensor]):
        def hook(module: nn.Module, arguments: Any, coef: Any) -> None:
            if coef.beta is not None:
                gates["beta"] = coef.beta
            if coef.log_decay is not None:
                gates["decay"] = coef.log_decay.exp()

        return hook

    def read(gates: dict[str, Tensor]):
        def hook(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
            q, _, coef = arguments
            gates["lambda"] = module.strength(q, coef.query_scale)
            gates["lambda_trace"] = module.lambda_times_trace

        return hook

    hooks = [layer.write.register_forward_hook(write(gates)) for layer, gates in zip(layers, seen, strict=True)]
    watched: list[tuple[Any, dict[str, Tensor]]] = [
        (layer.read, gates) for layer, gates in zip(layers, seen, strict=True) if layer.read.name == "ccq"
    ]
    hooks += [rule.register_forward_hook(read(gates), with_kwargs=True) for rule, gates in watched]
    try:
        for rule, _ in watched:
            rule.watched = True
        yield seen
    finally:
        for rule, _ in watched:
            for name in ("watched", "lambda_times_trace"):
                rule.__dict__.pop(name, None)  # those of the class again: what compiled code knows the rule by
        for hook in hooks:
            hook.remove()
