"""Does the read keep what is asked for? Needle keys against haystack keys, and how well a needle is found by length and depth.

The diagnostic is that of the CCQ paper (arXiv 2606.01294): keys of the haystack crowd in a few directions, which I − λΣ shrinks; the keys
of a needle should lie elsewhere, so that more of the query along them survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastweights import ops
from fastweights.evaluate.statistics import mean_estimate
from fastweights.layers import FastWeightAttention
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.notation import CCQState, Coefficients, MemoryState
from fastweights.ops.heads import as_written
from fastweights.read.ccq import CCQ


class Needle(NamedTuple):
    """Where things are in a text of T tokens; ends are exclusive."""

    begin: int
    end: int
    """The needle's tokens."""
    question: int
    """All other tokens before this one are haystack."""
    asked: int
    """The tokens from this one on read with queries for the needle: the last of the question, and the answer's but the last."""
    asked_end: int

    def check(self, T: int) -> None:
        if not 0 <= self.begin < self.end <= self.question <= self.asked < self.asked_end <= T:
            raise ValueError(f"{self} in a text of {T} tokens: needle, question and what is asked must follow each other")
        if self.end - self.begin == self.question:
            raise ValueError("the needle is all of the text before the question; without a haystack there is nothing to compare it with")

    @property
    def passage(self) -> tuple[int, int]:
        """An ordinary passage of the haystack, begin and end: as long as the needle if it fits, amid the longer part before or after."""
        first, last = (0, self.begin) if self.begin >= self.question - self.end else (self.end, self.question)
        length = min(self.end - self.begin, last - first)
        begin = first + (last - first - length) // 2
        return begin, begin + length


class NeedleKeys:
    """Sums over the keys of needle, haystack and an ordinary passage of it in one layer, as chunks come; they do not grow with the text."""

    KINDS = ("needle", "haystack", "passage")

    def __init__(self, needle: Needle, mixer: FastWeightAttention, top: int) -> None:
        self.needle, self.mixer, self.top = needle, mixer, top
        write, read = mixer.write, mixer.read
        self.unit_keys: bool = read.unit_keys if isinstance(read, CCQ) else not write.keys_bounded or write.key_scale_per_value_head
        """Keys count as CCQ counts them; for a raw read, as it would by default."""
        self.eps: float = read.options.eps if isinstance(read, CCQ) else 1e-6
        H, K = mixer.num_heads, mixer.head_k_dim
        self.second = {kind: torch.zeros(H, K, K, dtype=torch.float64) for kind in self.KINDS}
        """Σ k kᵀ over the keys."""
        self.directions = {kind: torch.zeros(H, K, K, dtype=torch.float64) for kind in self.KINDS}
        """Σ u uᵀ over their directions u = k/‖k‖."""
        self.energy = {(kind, when): torch.zeros(H, dtype=torch.float64) for kind in self.KINDS for when in ("before", "after")}
        """Σ over the queries of Σ_j (k_jᵀq)²."""
        self.lam = torch.zeros(H, dtype=torch.float64)
        self.sigma: CCQState | None = None

    def add(self, done: int, q: Tensor, k: Tensor, coef: Coefficients, cleaned: Tensor, lam: Tensor | None, after: MemoryState) -> None:
        """A chunk that begins at token ``done``: float64 q, k, q' ``[1, T, Hk, K]``, λ ``[1, T, Hk]`` or None, and the state after it."""
        keys = k if self.unit_keys else as_written(k, coef)
        if self.unit_keys:
            keys = keys * torch.rsqrt(keys.square().sum(-1, keepdim=True) + self.eps)
        place = torch.arange(done, done + k.shape[1], device=k.device)
        inside = (place >= self.needle.begin) & (place < self.needle.end)
        begin, end = self.needle.passage
        masks = (inside, ~inside & (place < self.needle.question), (place >= begin) & (place < end))
        for kind, mask in zip(self.KINDS, masks, strict=True):
            chosen = keys[0, mask]
            unit = chosen / chosen.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
            self.second[kind] += torch.einsum("thk,thl->hkl", chosen, chosen).cpu()
            self.directions[kind] += torch.einsum("thk,thl->hkl", unit, unit).cpu()
        asked = (place >= self.needle.asked) & (place < self.needle.asked_end)
        for when, queries in (("before", q), ("after", cleaned)):
            for kind in self.KINDS:
                chosen = queries[0, asked].cpu()
                self.energy[kind, when] += torch.einsum("thk,hkl,thl->h", chosen, self.second[kind], chosen)
        if lam is not None:
            self.lam += lam[0, asked].sum(0).cpu()
            self.sigma = after.read
        else:  # a raw read keeps no covariance: the op that would keeps it here, with λ = 0
            _, self.sigma = ops.ccq_query(q, keys, torch.zeros_like(q[..., 0]), state=self.sigma)

    def result(self) -> dict[str, Any]:
        """A number a key head ``[Hk]``, for needle, haystack and passage each:

        ``projection``: for r = 1 … top, the mean share of a key's squared length along the r largest eigenvectors of Σ after the text.
        With CCQ also ``survives_query``: √(Σ (k_jᵀq')² / Σ (k_jᵀq)²) over its keys and the asking queries; and ``survives_direction``:
        1 − λ·mean uᵀΣu over the directions of its keys, with the mean λ of the asking queries.
        """
        assert self.sigma is not None
        weight = self.sigma.weight[0].double()
        sigma = (self.sigma.covariance[0].double() / weight[:, None, None]).cpu()
        axes = torch.linalg.eigh(sigma).eigenvectors.flip(-1)[..., : self.top]
        length, (begin, end) = self.needle.end - self.needle.begin, self.needle.passage
        count = {"needle": length, "haystack": self.needle.question - length, "passage": end - begin}
        found: dict[str, Any] = {"projection": {}, "tokens": count}
        for kind in self.KINDS:
            along = torch.einsum("hkr,hkl,hlr->rh", axes, self.directions[kind], axes).cumsum(0) / count[kind]
            found["projection"][kind] = along.tolist()
        if isinstance(self.mixer.read, CCQ):
            lam = self.lam / (self.needle.asked_end - self.needle.asked)
            found["survives_query"], found["survives_direction"] = {}, {}
            for kind in self.KINDS:
                found["survives_query"][kind] = (self.energy[kind, "after"] / self.energy[kind, "before"]).sqrt().tolist()
                curvature = torch.einsum("hkl,hkl->h", sigma, self.directions[kind]) / count[kind]
                found["survives_direction"][kind] = (1 - lam * curvature).tolist()
        return found


def over_prompts(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `NeedleKeys.result` found in a layer for several prompts: means over them, in the same form, and how sure they are.

    ``prompts``: how many. ``difference``: by quantity (``projection`` along all its directions) and by what the needle is held against,
    ``haystack`` or ``passage``, needle less that: ``mean`` over the heads, and ``heads``, each an `Estimate` over the prompts as a dict;
    and ``below``, the share of the prompts in which the needle has less, in the mean over heads.
    """
    found: dict[str, Any] = {"prompts": len(results), "difference": {}}
    for name, kinds in results[0].items():
        found[name] = {kind: np.mean([one[name][kind] for one in results], axis=0).tolist() for kind in kinds}
        if name != "tokens":
            by_kind = {kind: np.array([one[name][kind] for one in results]) for kind in kinds}
            last = {kind: x[:, -1] if name == "projection" else x for kind, x in by_kind.items()}
            found["difference"][name] = {other: _difference(last["needle"], last[other]) for other in ("haystack", "passage")}
    return found


def _difference(needle: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
    """Of quantities ``[prompts, heads]``."""
    apart = needle - other
    return {
        "mean": mean_estimate(apart.mean(1))._asdict(),
        "heads": [mean_estimate(head)._asdict() for head in apart.T],
        "below": float((apart.mean(1) < 0).mean()),
    }


class Found(NamedTuple):
    """How well an answer was known."""

    nats: float
    """−log p of the answer, all its tokens together."""
    retrieved: bool
    """Greedy decoding from the prompt says exactly the answer."""


@torch.inference_mode()
def find_needle(model: FastWeightsForCausalLM, prompt: Sequence[int], answer: Sequence[int], *, chunk: int = 512) -> Found:
    """Read a prompt in chunks through the cache, then the answer. Greedy decoding gives the answer exactly when each of its tokens is the
    likeliest after the ones before, so that one pass tells both."""
    if not prompt or not answer:
        raise ValueError(f"a prompt of {len(prompt)} tokens and an answer of {len(answer)}: both are needed")
    cache = FastWeightsCache(model.config)
    pieces = [prompt[i : min(i + chunk, len(prompt) - 1)] for i in range(0, len(prompt) - 1, chunk)]
    for piece in pieces:
        model.base_model(torch.tensor([piece], device=model.device), cache=cache, use_cache=True)
    last = torch.tensor([[prompt[-1], *answer[:-1]]], device=model.device)
    logits = model(last, cache=cache, use_cache=True).logits[0].double()
    wanted = torch.tensor(answer, device=model.device)
    nats = -logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).sum()
    return Found(nats.item(), bool((logits.argmax(-1) == wanted).all()))
