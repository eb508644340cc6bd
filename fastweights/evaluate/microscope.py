"""A microscope for memories: what each layer and head writes, keeps, forgets and reads, token by token, over any text.

Hooks on the model's own forward pass catch what the layer hands to its recurrence: q, k, v, the write rule's coefficients, the query as
the read rule leaves it, the states before and after. Nothing of the layer is computed a second time; what is missing is asked of the
layer's own recurrence, in float64. The text is fed in chunks through the cache, so that only the recorded rows grow with it.

`TOKENS` and `STATES` say what is measured. What a rule does not have is absent from its rows, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastweights.evaluate.needle import Needle, NeedleKeys
from fastweights.layers import FastWeightAttention
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM, FastWeightsModel
from fastweights.notation import CCQState, Coefficients, MemoryState
from fastweights.read.ccq import CCQ

TOKENS = {
    "key_norm": "‖k‖, the key as the write rule is given it",
    "written_key_norm": "‖k̂‖, the key as it is written",
    "value_norm": "‖v̂‖, the value as it is written",
    "residual": "‖v̂ − S̃ᵀk̂‖, how far the memory is from the value just before the write",
    "residual_share": "‖v̂ − S̃ᵀk̂‖/‖v̂‖: 0 knows the value, 1 is no better than an empty memory, more is worse; 0 for a value of length 0",
    "beta": "β, the write strength (KLA's η; its paper's β is η/(‖k‖²+ε))",
    "corrected": "β‖k̂‖², the share of the residual that the write takes away: 1 is all of it, more overshoots",
    "decay": "a, the forget gate; the mean over the channels where each has its own",
    "decay_min": "the smallest a of a channel",
    "decay_max": "the largest a of a channel",
    "forgotten": "−log a, the mean over the channels where each has its own: 1 over its mean is how many tokens the memory lasts",
    "lambda": "λ, CCQ's strength",
    "lambda_trace": "λ·tr Σ, a bound on λ‖Σ‖",
    "removed": "‖q − q'‖/‖q‖, the share of the query that CCQ takes away",
    "removed_top": "the share of ‖q − q'‖² along the largest directions of Σ after the chunk, as many as sigma_top has",
    "query_top": "the share of ‖q‖² along the same directions",
}
"""What is measured at a token, a number a head ``[rows, heads]``: per key head for ``key_norm`` and reads, per value head for what is
written."""
STATES = {
    "frobenius": "‖S‖_F",
    "spectral": "‖S‖₂, the largest singular value",
    "stable_rank": "‖S‖_F²/‖S‖₂²",
    "effective_rank": "exp of the entropy of the singular values, taken as shares of their sum",
    "numerical_rank": "singular values above rank_tolerance times the largest",
    "sigma_trace": "tr Σ",
    "sigma_top": "the largest eigenvalues of Σ, the covariance of the keys",
}
"""What is measured of the state after each chunk ``[looks, heads]``; ``sigma_top`` is ``[looks, heads, top]``. An empty memory has
rank 0."""


@dataclass(kw_only=True)
class LayerView:
    """What was seen in one layer."""

    layer: int
    mixer: str
    key_heads: int
    value_heads: int
    tokens: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Name in `TOKENS` to ``[rows, heads]``."""
    states: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Name in `STATES` to ``[looks, heads]`` or ``[looks, heads, top]``."""
    needle: dict[str, Any] | None = None
    """`NeedleKeys.result`, where a needle was given; of several prompts `over_prompts`."""


class View(NamedTuple):
    """What the microscope saw."""

    positions: NDArray[np.int64]
    """The token of each row ``[rows]``."""
    looks: NDArray[np.int64]
    """How many tokens each state had read ``[looks]``."""
    layers: list[LayerView]
    without_memory: list[int]
    """The softmax layers among those asked for."""


@torch.inference_mode()
def inspect_memory(
    model: FastWeightsForCausalLM | FastWeightsModel,
    ids: Tensor,
    *,
    layers: Sequence[int] | None = None,
    chunk: int = 256,
    stride: int = 1,
    top: int = 4,
    rank_tolerance: float = 1e-3,
    needle: Needle | None = None,
    needle_only: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> View:
    """Read a text and record what its memories do.

    Args:
        model: with any mixers; softmax layers are passed over.
        ids: the text ``[T]``, int64.
        layers: which ones, from 0; None is all.
        chunk: tokens fed at a time; the states are looked at after each chunk.
        stride: record the tokens 0, stride, 2·stride, ….
        top: eigenvalues of Σ, and key directions that needles are held against; at most K are there.
        rank_tolerance: see `STATES`.
        needle: where the needle, the question and the answer are in the text; None where there is none.
        needle_only: look at nothing else, which is several times faster; the layers have neither tokens nor states.
        on_progress: called with (tokens read, tokens in all).

    Raises:
        ValueError: an empty text, layers that do not exist, or none of them with a memory.
    """
    base: Any = model.base_model
    T = len(ids)
    if T == 0:
        raise ValueError("the text has no tokens")
    for name, value in (("chunk", chunk), ("stride", stride), ("top", top)):
        if value < 1:
            raise ValueError(f"{name}={value} is not positive")
    seen, without_memory = layers_with_memory(model, layers)
    if needle is not None:
        needle.check(T)

    looks = np.minimum(np.arange(chunk, T + chunk, chunk), T)
    view = View(np.arange(0, T, stride), looks, [], without_memory)
    lenses = [_Lens(base.layers[i].mixer, i, view, stride, top, rank_tolerance, needle, needle_only) for i in seen]
    cache = FastWeightsCache(model.config)
    with ExitStack() as hooks:
        for lens in lenses:
            for hook in lens.attach():
                hooks.callback(hook.remove)
        for begin, end in zip([0, *looks.tolist()], looks.tolist(), strict=False):
            base(ids[begin:end].unsqueeze(0).to(model.device), cache=cache, use_cache=True)
            on_progress(end, T)
    return view._replace(layers=[lens.finish() for lens in lenses])


def layers_with_memory(model: FastWeightsForCausalLM | FastWeightsModel, layers: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Of the layers asked for (None is all), those with a memory and the softmax ones.

    Raises:
        ValueError: layers that do not exist, or none of them with a memory.
    """
    base: Any = model.base_model
    mixers = [block.mixer for block in base.layers]
    wanted = range(len(mixers)) if layers is None else list(layers)
    for layer in wanted:
        if not 0 <= layer < len(mixers):
            raise ValueError(f"layer {layer} does not exist; the model has layers 0 to {len(mixers) - 1}")
    seen = [i for i in wanted if isinstance(mixers[i], FastWeightAttention)]
    if not seen:
        raise ValueError(
            f"there is no memory to look at: layer {', '.join(map(str, wanted))} is softmax attention, which keeps all it read"
        )
    return seen, [i for i in wanted if i not in seen]


class _Lens:
    """Hooks on one layer, and what they have caught."""

    def __init__(
        self,
        mixer: FastWeightAttention,
        layer: int,
        view: View,
        stride: int,
        top: int,
        rank_tolerance: float,
        needle: Needle | None,
        needle_only: bool,
    ) -> None:
        self.needle_only = needle_only
        self.mixer, self.stride, self.top, self.rank_tolerance = mixer, stride, min(top, mixer.head_k_dim), rank_tolerance
        self.rows, self.looks = len(view.positions), len(view.looks)
        self.seen = LayerView(layer=layer, mixer=mixer.mixer, key_heads=mixer.num_heads, value_heads=mixer.num_value_heads)
        self.needle = None if needle is None else NeedleKeys(needle, mixer, self.top)
        self.done = self.looked = 0
        """Tokens read, and chunks."""
        self.caught: dict[str, Any] = {}

    def attach(self) -> Iterator[Any]:
        """Registers the hooks; their handles."""
        yield self.mixer.write.register_forward_hook(lambda write, args, coef: self.caught.update(v=args[2]))
        yield self.mixer.read.register_forward_hook(self._on_read, with_kwargs=True)
        yield self.mixer.register_forward_hook(self._on_layer, with_kwargs=True)

    def _on_read(self, read, args, kwargs, output) -> None:
        q, k, coef = args
        self.caught.update(q=q, k=k, coef=coef, cleaned=output[0])

    def _on_layer(self, mixer, args, kwargs, output) -> None:
        before, after, caught = kwargs["state"], output[1], self.caught
        q, k, v, cleaned = (caught[name].double() for name in ("q", "k", "v", "cleaned"))
        coef = Coefficients(*(None if x is None else x.double() for x in caught["coef"]))
        lam = mixer.read.strength(caught["q"], caught["coef"].query_scale).double() if isinstance(mixer.read, CCQ) else None
        if not self.needle_only:
            found = written(mixer, k, v, coef, None if before is None else before.memory)
            if lam is not None:
                trace = mixer.read.trace(caught["k"], caught["coef"], None if before is None else before.read)
                found |= {"lambda": lam, "lambda_trace": lam * trace} | removed(q, cleaned, after.read, self.top)
            self._record(found, state_of(after, self.top, self.rank_tolerance))
        if self.needle is not None:
            self.needle.add(self.done, q, k, coef, cleaned, lam, after)
        self.done, self.looked = self.done + k.shape[1], self.looked + 1

    def _record(self, found: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        first, row = -self.done % self.stride, -(-self.done // self.stride)
        for name, x in found.items():
            x = x[0, first :: self.stride].cpu()
            _room(self.seen.tokens, name, (self.rows, *x.shape[1:]))[row : row + len(x)] = x
        for name, x in states.items():
            _room(self.seen.states, name, (self.looks, *x.shape[1:]))[self.looked] = x[0].cpu()

    def finish(self) -> LayerView:
        if self.needle is not None:
            self.seen.needle = self.needle.result()
        return self.seen


def _room(found: dict[str, NDArray[np.float64]], name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The array under a name, made at first for all that will come: small pieces kept from every chunk would scatter over the heap."""
    if name not in found:
        found[name] = np.empty(shape)
    return found[name]


def written(mixer: FastWeightAttention, k: Tensor, v: Tensor, coef: Coefficients, memory: Tensor | None) -> dict[str, Tensor]:
    """What concerns the write, of `TOKENS` ``[B, T, heads]``, from a chunk's float64 operands and the memory before it."""
    G = mixer.num_value_heads // mixer.num_heads

    def per_value_head(x: Tensor) -> Tensor:
        return x if x.shape[2] == mixer.num_value_heads else x.repeat_interleave(G, dim=2)

    key_norm = k.norm(dim=-1)
    predicted = before_write(mixer, k, v, coef, memory)
    written_norm = per_value_head(key_norm)
    if coef.key_scale is not None:
        scale = per_value_head(coef.key_scale)
        predicted, written_norm = predicted * scale.unsqueeze(-1), written_norm * scale
    value = v if coef.value_scale is None else v * per_value_head(coef.value_scale).unsqueeze(-1)
    found = {"key_norm": key_norm, "written_key_norm": written_norm, "value_norm": value.norm(dim=-1)}
    found["residual"] = residual = (value - predicted).norm(dim=-1)
    length = found["value_norm"]
    found["residual_share"] = torch.where(length > 0, residual / length.where(length > 0, 1), 0)
    if mixer.write.family == "delta":
        beta = torch.ones_like(written_norm) if coef.beta is None else coef.beta
        found |= {"beta": beta, "corrected": beta * written_norm.square()}
    if coef.log_decay is not None:
        a = coef.log_decay.exp()
        per_channel = a.dim() == 4
        found["decay"] = a.mean(-1) if per_channel else a
        if per_channel:
            found |= {"decay_min": a.amin(-1), "decay_max": a.amax(-1)}
        found["forgotten"] = -coef.log_decay.mean(-1) if per_channel else -coef.log_decay
    return found


def before_write(mixer: FastWeightAttention, k: Tensor, v: Tensor, coef: Coefficients, memory: Tensor | None) -> Tensor:
    """S̃_tᵀk_t ``[B, T, Hv, V]``: what the memory says at each key (before key_scale) when it has forgotten and not yet written.

    The layer's own recurrence says it: before each token goes one with the same key and decay that writes nothing and reads with the key.
    """

    def twice(probe: Tensor, token: Tensor) -> Tensor:
        return torch.stack([probe, token], dim=2).flatten(1, 2)

    def both(x: Tensor | None) -> Tensor | None:
        return None if x is None else twice(x, x)

    beta, decay = coef.beta, coef.log_decay
    if mixer.write.family == "delta":
        beta = v.new_ones(v.shape[:3]) if beta is None else beta
    probed = Coefficients(
        beta=None if beta is None else twice(torch.zeros_like(beta), beta),
        log_decay=None if decay is None else twice(decay, torch.zeros_like(decay)),
        key_scale=both(coef.key_scale),
        value_scale=both(coef.value_scale),
    )
    keys = twice(k, k)
    o, _ = mixer.recurrence(keys, keys, twice(torch.zeros_like(v), v), probed, state=None if memory is None else memory.double())
    return o[:, ::2]


def removed(q: Tensor, cleaned: Tensor, after: CCQState, top: int) -> dict[str, Tensor]:
    """What CCQ takes away and where, of `TOKENS` ``[1, T, Hk]``, from float64 q and q' ``[1, T, Hk, K]`` and the state after the chunk."""
    axes = torch.linalg.eigh(key_covariance(after)).eigenvectors[..., -top:]
    taken, tiny = q - cleaned, torch.finfo(torch.float64).tiny
    lengths = {"removed": taken.norm(dim=-1), "query": q.norm(dim=-1)}

    def along(x: Tensor, length: Tensor) -> Tensor:
        return torch.einsum("bthk,bhkr->bthr", x / length.clamp(min=tiny).unsqueeze(-1), axes).square().sum(-1)

    return {
        "removed": lengths["removed"] / lengths["query"].clamp(min=tiny),
        "removed_top": along(taken, lengths["removed"]),
        "query_top": along(q, lengths["query"]),
    }


def state_of(state: MemoryState, top: int, rank_tolerance: float) -> dict[str, Tensor]:
    """`STATES` of a layer's state, a row of state and a head ``[R, heads]`` in float64."""
    singular = torch.linalg.svdvals(state.memory.double())
    largest, total = singular[..., 0], singular.sum(-1)
    empty = largest == 0
    share = singular / total.where(~empty, 1).unsqueeze(-1)
    found = {
        "frobenius": singular.square().sum(-1).sqrt(),
        "spectral": largest,
        "stable_rank": singular.square().sum(-1) / largest.square().where(~empty, 1),
        "effective_rank": torch.special.entr(share).sum(-1).exp().where(~empty, 0),
        "numerical_rank": (singular > rank_tolerance * largest.unsqueeze(-1)).sum(-1).double(),
    }
    if state.read is not None:
        sigma = key_covariance(state.read)
        found["sigma_trace"] = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)
        found["sigma_top"] = torch.linalg.eigvalsh(sigma).flip(-1)[..., :top]
    return found


def key_covariance(state: CCQState) -> Tensor:
    """Σ = C / w ``[R, Hk, K, K]``, float64; 0 before the first key."""
    weight = state.weight.double()
    return state.covariance.double() / weight.where(weight > 0, 1)[..., None, None]
