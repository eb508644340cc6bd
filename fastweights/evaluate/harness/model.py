"""A model as lm-evaluation-harness wants it: real lengths, masks on both sides, and no more logits than are asked for.

The harness's own `HFLM` does the talking to tokenizers and generates; what it does for fixed-context transformers is replaced:

* ``max_length``: none unless the configuration has one, where `HFLM` silently takes 2,048;
* log-likelihoods: with an attention mask, so that padding enters neither convolution nor memory; logits only where something is scored;
* rolling log-likelihoods: in chunks through the memory, at constant memory for any length;
* prompts that are too long to generate from: cut on the left as `HFLM` does, or in the middle, as LongBench does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import truncate_tokens
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastweights.evaluate.harness.tasks import quiet
from fastweights.evaluate.perplexity import stream_nats
from fastweights.models import FastWeightsConfig

NO_LIMIT = 2**40
"""A length that no text reaches: the harness counts with it."""
CHUNK = 2048
"""Tokens of a rolling window that are fed at a time."""
Request = tuple[Any, list[int], list[int]]
"""(texts, context tokens, continuation tokens)."""


class HarnessModel(HFLM):
    """Any causal language model of transformers, for the harness.

    Args:
        max_length: tokens a model is given at most; None: what its configuration says, and no limit where that says nothing.
        begin: put the document token (bos, else eos) before every text; None: for our models, which are trained so, and for others what
            their tokenizer does.
    """

    cut: Literal["left", "middle"]
    """Which part of a prompt goes that leaves no room for the answer."""
    truncated: int
    """Texts cut since it was last set to 0."""
    on_progress: Callable[[int, int], None]
    """Told (requests done, requests in all) of the method that runs."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        begin: bool | None = None,
    ) -> None:
        limit = context_limit(model) if max_length is None else max_length
        with quiet():
            super().__init__(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch_size,
                max_length=NO_LIMIT if limit is None else limit,
            )
        self.limit = limit
        self.begin = isinstance(model.config, FastWeightsConfig) if begin is None else begin
        self.cut, self.truncated, self.on_progress = "left", 0, lambda done, total: None
        self._done = self._total = 0
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs) -> list[int]:
        ids = super().tok_encode(string, add_special_tokens=add_special_tokens, **kwargs)
        if self.begin and add_special_tokens is not False and ids[:1] != [self.prefix_token_id]:
            ids = [self.prefix_token_id, *ids]
        return ids if left_truncate_len is None else ids[-left_truncate_len:]

    def tok_batch_encode(
        self, strings: Sequence[str], padding_side: str = "left", left_truncate_len: int | None = None, truncation: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Token ids and mask ``[B, T]``, padded on the left; each prompt cut to ``left_truncate_len`` tokens by `cut`."""
        rows = [self.tok_encode(string) for string in strings]
        if left_truncate_len is not None:
            self.truncated += sum(len(row) > left_truncate_len for row in rows)
            rows = [truncate_tokens(row, left_truncate_len, side=self.cut) if len(row) > left_truncate_len else row for row in rows]
        return _padded(rows, side="left", pad=self.tokenizer.pad_token_id)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        self._done, self._total = 0, len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs) -> Tensor:
        with torch.inference_mode():
            out = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self._did(len(context))
        return out

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._done, self._total = 0, len(requests)
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, whether it is the greedy continuation) of each continuation.

        Requests that feed the model the same tokens, as the one-token answers of a question do, share a row.
        """
        sharing: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            tokens = context + continuation
            if len(continuation) > self.max_length:
                raise ValueError(f"max_length={self.max_length} is shorter than an answer of {len(continuation)} tokens")
            self.truncated += len(tokens) > self.max_length + 1
            sharing.setdefault(tuple(tokens[-(self.max_length + 1) :][:-1]), []).append(number)
        answers: dict[int, tuple[float, bool]] = {}
        rows = sorted(sharing, key=len, reverse=True)  # the longest first: what does not fit in memory fails at once
        size = int(override_bs or self.batch_size)
        for begin in range(0, len(rows), size):
            batch = rows[begin : begin + size]
            continuations = {number: requests[number][2] for row in batch for number in sharing[row]}
            places = sorted({at for row in batch for n in sharing[row] for at in range(len(row) - len(continuations[n]), len(row))})
            logits = self._logits(batch, places)
            for row, scored in zip(batch, logits, strict=True):
                for number in sharing[row]:
                    continuation = continuations[number]
                    first = places.index(len(row) - len(continuation))
                    answers[number] = _score(scored[first : first + len(continuation)], continuation)
            self._did(len(continuations))
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, each after the document token, in the harness's windows of ``max_length`` tokens."""
        self._done, self._total = 0, len(requests)
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        total = 0.0
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        for context, continuation in map(make_disjoint_window, windows):
            ids = torch.tensor([context + continuation], device=self.device)
            scored_from = len(context) - 1
            with torch.inference_mode():
                for begin, nats in stream_nats(self.model, ids, chunk=CHUNK):
                    total -= nats[0, max(0, scored_from - begin) :].double().sum().item()
        self._did(1)
        return total

    def _did(self, requests: int) -> None:
        self._done += requests
        self.on_progress(self._done, self._total)

    def _logits(self, rows: Sequence[Sequence[int]], places: Sequence[int]) -> Tensor:
        """Logits ``[B, len(places), vocabulary]`` at the places of the rows, which are padded on the right."""
        ids, mask = (part.to(self.device) for part in _padded(rows, side="right", pad=0))
        keep = torch.tensor(places, device=self.device)
        with torch.inference_mode():
            if self._keeps:
                return self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits
            return self.model(ids, attention_mask=mask, use_cache=False).logits[:, keep]


def context_limit(model: PreTrainedModel) -> int | None:
    """The most tokens the configuration allows, or None where it sets no limit, as ours do not."""
    config = model.config.get_text_config()
    return next((int(n) for name in ("n_positions", "max_position_embeddings", "n_ctx") if (n := getattr(config, name, None))), None)


def _padded(rows: Sequence[Sequence[int]], *, side: Literal["left", "right"], pad: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        real = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, real], mask[i, real] = torch.tensor(row), 1
    return ids, mask


def _score(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """From logits ``[tokens, vocabulary]``, in float32 whatever the model's type."""
    logits, targets = logits.float(), torch.tensor(continuation, device=logits.device)
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    return (chosen - logits.logsumexp(1)).double().sum().item(), bool((logits.argmax(1) == targets).all())
