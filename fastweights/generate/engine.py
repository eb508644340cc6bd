"""The decoding engine: requests wait in a bounded queue, are read in pieces, join a row, are decoded side by side, and leave.

One call of `Engine.step` reads at most ``prefill_chunk`` tokens of prompts and decodes one token of every row, so that a long prompt does
not hold up the answers of others. There is no thread inside. Whoever waits for a request does the steps, one at a time, for all of them;
so the same engine serves a plain script, threads, and asyncio. docs/generation.md has the reasons.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property

import torch
from transformers import PreTrainedTokenizerBase

from fastweights.generate.lookup import Lookup, check_guess
from fastweights.generate.passes import Passes
from fastweights.generate.prefixes import Prefixes
from fastweights.generate.prompts import Tokens, check_prompt, end_tokens, joined, prompt_tokens
from fastweights.generate.reading import Reading, begin, default_chunk
from fastweights.generate.request import Completion, FinishReason, Request, ask
from fastweights.generate.rows import FAILED, Launched, Rows
from fastweights.generate.sampling import Sampling
from fastweights.generate.snapshot import Snapshot, describe, model_fingerprint, seen_tokens
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.cache import LayerState

GREEDY = Sampling()


class QueueFull(RuntimeError):
    """As many requests are waiting as may; ask again when some are done."""


class Engine:
    """Decodes with one model.

    Args:
        model: in evaluation mode, on its device. The engine changes nothing about it.
        tokenizer: for prompts and answers as text; without one both are tokens.
        rows: sequences decoded side by side.
        queue: requests that may wait for a row; one more raises `QueueFull`.
        prefill_chunk: tokens read at a time; by default 512, on a CUDA device 16,384.
        max_context: tokens of prompt and answer that a request may have; None: any number. A model with full softmax layers needs it, as
            each row keeps the keys of so many tokens.
        prefixes: states of texts read before that are kept to begin later prompts from; 0: none.
        compile: by torch.compile, on a GPU when the engine is made: faster, after a wait. Other bits, so other tokens where two are close.

    Raises:
        ValueError: for numbers that are not positive, or a model that the engine cannot decode with.
    """

    def __init__(
        self,
        model: FastWeightsForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        rows: int = 8,
        queue: int = 64,
        prefill_chunk: int | None = None,
        max_context: int | None = None,
        prefixes: int = 0,
        compile: bool = False,
    ) -> None:
        prefill_chunk = default_chunk(model.device) if prefill_chunk is None else prefill_chunk
        sizes = {"rows": rows, "queue": queue, "prefill_chunk": prefill_chunk, "max_context": max_context, "prefixes": prefixes}
        for name, size in sizes.items():
            least = 0 if name == "prefixes" else 1
            if size is not None and (not isinstance(size, int) or size < least):
                raise ValueError(f"{name}={size!r} is not a whole number of at least {least}")
        self.model, self.tokenizer = model, tokenizer
        self.queue, self.prefill_chunk, self.max_context = queue, prefill_chunk, max_context
        self.eos = end_tokens(model, tokenizer)
        self.prefixes = Prefixes(prefixes)
        self.passes = Passes(model, compile)
        with torch.inference_mode():
            self.rows = Rows(self.passes, rows, max_context)
        self.passes.warm_up(prefill_chunk)
        self.turn = threading.Condition()
        """Held while requests change hands, never while the model works."""
        self._working = False
        self._waiting: deque[Request] = deque()
        self._again: deque[Request] = deque()
        """Requests that were in rows when a step failed. Each is tried alone, so that one that makes the model fail fails by itself."""
        self._on_trial: Request | None = None
        self._incoming: Request | None = None
        """The one whose prompt is being read."""
        self._active: dict[int, Request] = {}
        self._under_way: tuple[dict[int, Request], Launched | None] | None = None
        """The step that was launched and not read yet."""
        self._torn = False
        """Was a step left half-way, so that rows may not stand where the tokens of their requests say?"""

    # What callers ask for. ------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        after: Snapshot | None = None,
        keep: bool = False,
    ) -> Request:
        """Queue a request, from any thread. It moves on while somebody waits for it or for another, or calls `step`.

        Args:
            prompt: text, or tokens; after a snapshot it may be empty.
            after: what the prompt goes on from.
            keep: make a snapshot of the memory after the answer.

        Raises:
            ValueError: for a prompt, settings or snapshot that this engine cannot take.
            QueueFull: if as many requests are waiting as may.
        """
        request = ask(self, prompt, sampling, after, keep)
        with self.turn:
            if not self._enqueue(request):
                raise QueueFull(f"{len(self._waiting)} requests are waiting, and queue={self.queue} may; ask again when some are done")
        return request

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        after: Snapshot | None = None,
        keep: bool = False,
    ) -> list[Completion]:
        """Answer all prompts, any number of them, each by the same or by its own settings. Arguments and errors as of `submit`.

        Bad prompts and settings are found before anything runs; a failure of the model is the ``error`` of the one it concerns.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a single string; give a list, or use stream()")
        every = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(every) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(every)} settings; give one Sampling, or one a prompt")
        requests = [ask(self, prompt, how, after, keep) for prompt, how in zip(prompts, every, strict=True)]
        try:
            for request in requests:
                self.work_until(lambda request=request: self._enqueue(request))  # type: ignore[misc]
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def stream(self, prompt: str | Sequence[int], sampling: Sampling = GREEDY, *, after: Snapshot | None = None) -> Iterator[str]:
        """The answer's text in pieces, as it comes. Arguments and errors as of `submit`; leaving the loop cancels the request."""
        return iter(self.submit(prompt, sampling, after=after))

    @torch.inference_mode()
    def remember(
        self,
        text: str | Sequence[int],
        *,
        after: Snapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Snapshot:
        """Read ``text``, after what a snapshot remembers already, and keep the memory of it. Memory does not grow with the text.

        ``on_progress`` is called with (tokens read, tokens in all). Raises ValueError as `submit` does.
        """
        tokens = prompt_tokens(text, self.tokenizer, begins=after is None)
        self.check(tokens, 0, after)
        seen = seen_tokens(self.model, tokens, after)
        tokens = tokens if after is None else joined(after.pending, tokens)
        reading = begin(self.passes, self.prefill_chunk, tokens, after, self.prefixes)
        while reading.at_chunks_end:
            reading.go_on()
            on_progress(len(tokens) - reading.remaining, len(tokens))
        states, read, pending = reading.states, reading.read, tuple(reading.left.tolist())
        if self.prefixes.capacity and after is None:
            reading.go_on()
            self.prefixes.put(tokens[:-1], reading.states)
        on_progress(len(tokens), len(tokens))
        return Snapshot(tuple(states), read, pending, seen, self.fingerprint, describe(self.model))

    def step(self) -> bool:
        """Do one step, unless another thread is at it. Is there anything left to do?"""
        with self.turn:
            if self.busy and not self._working:
                self._work()
            return self.busy

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting or self._again or self._incoming)

    @cached_property
    def fingerprint(self) -> str:
        """Of the model, as snapshots carry it; reads all weights once."""
        return model_fingerprint(self.model)

    # Whose turn it is. ----------------------------------------------------------------------------------------------------------------

    def work_until(self, ready: Callable[[], bool]) -> None:
        """Do steps until ``ready()``, or wait while another thread does them. ``ready`` is called while `turn` is held."""
        with self.turn:
            while not ready():
                if self._working:
                    self.turn.wait()
                else:
                    self._work()

    def _work(self) -> None:
        """One step, by the caller, who holds `turn`."""
        try:
            self._working = True
            self.turn.release()  # within `try`: an interrupt is raised behind it, not before
            self._step()
        finally:
            self.turn.acquire()
            self._working = False
            self.turn.notify_all()

    def _enqueue(self, request: Request) -> bool:
        """Is there room?"""
        if len(self._waiting) >= self.queue:
            return False
        self._waiting.append(request)
        self.turn.notify_all()
        return True

    # The step. ------------------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        if self._torn:
            self._recover()
        self._drop_cancelled()
        budget = self.prefill_chunk
        while budget > 0 and (request := self._next()) is not None:
            budget -= self._read(request)
        if self._active:
            self._decode()

    def _drop_cancelled(self) -> None:
        for row, request in list(self._active.items()):
            if not request.done and (request.cancelled or request.ending):  # it has an ending if an interrupt came before it could leave
                self._leave(row, request.ending or "cancelled")
        with self.turn:
            for left in [*self._active.values(), self._incoming]:
                if left is not None and left.done:  # an interrupt came before it was let go
                    self._let_go(left)
            for queue in (self._waiting, self._again):
                for request in [request for request in queue if request.cancelled]:
                    request.finish(request.ending or "cancelled")
                    queue.remove(request)
            if self._incoming is not None and self._incoming.cancelled:
                self._finish(self._incoming, self._incoming.ending or "cancelled")

    def _next(self) -> Request | None:
        """Whose prompt to read on: the one begun, or if a row is free, another."""
        with self.turn:
            if self._incoming is None and len(self._active) < self.rows.count and self._on_trial is None:
                queue = self._again or self._waiting
                if queue and not (self._again and self._active):
                    request = queue[0]  # no call from here on, within which an interrupt would lose it
                    self._incoming, self._on_trial = request, request if self._again else None
                    del queue[0]
            return self._incoming

    def _read(self, request: Request) -> int:
        """Read a piece of its prompt, and give it a row when only the last token is left. Returns the tokens read."""
        try:
            if request.reading is None:
                request.reading = begin(self.passes, self.prefill_chunk, request.text, request.after, self.prefixes)
                request.reused = request.reading.read
            length = request.reading.go_on()
            if not request.reading.piece:
                self._join(request, request.reading)
            return length
        except BaseException as error:
            request.reading = None
            if not isinstance(error, Exception):
                raise
            self._finish(request, "error", error)
            return 0

    def _join(self, request: Request, reading: Reading) -> None:
        tokens = request.text
        if request.ending is not None:  # an interrupt came before it could leave
            request.remember(reading.states)
            self._finish(request)
            return
        if request.after is None:
            self.prefixes.put(tokens[:-1], reading.states)
        row = min(set(range(self.rows.count)) - self._active.keys())
        seen = seen_tokens(self.model, tokens, request.after)
        self.rows.put(row, reading.states, int(tokens[-1]), seen, request.sampling, request.seed, len(request.tokens))
        with self.turn:
            request.reading, self._incoming = None, None
            self._active[row] = request

    def _decode(self) -> None:
        """One token for every row; more for rows that speculate."""
        self._torn = True
        try:
            ahead = {
                row: found
                for row, request in self._active.items()
                if request.lookup is not None and not self._under_way and (found := self._ahead(row, request, request.lookup)) is not None
            }
            behind, launched = self._under_way or self._launch(ahead)
            self._under_way = self._launch() if self._runs_ahead() else None  # so that the device does not wait for what follows
            output = launched.read() if launched is not None else []
            for row, (states, token, _) in ahead.items():  # only now, as the step has moved every row
                self.rows.put_states(row, states, token)
            with self.turn:
                ended = {row: last for row, (_, _, last) in ahead.items()}
                for row, request in behind.items():
                    if self._active.get(row) is request:  # not if it ended, or another took its row, since the launch
                        ended[row] = output[row] == FAILED or request.add(output[row], self.eos)
        except Exception as error:
            self._recover(error)
            return
        self._torn, self._on_trial = False, None
        for row in [row for row, last in ended.items() if last]:
            if row not in ahead and output[row] == FAILED:
                self._finish(self._active[row], "error", FloatingPointError("the model gave logits that are not finite"))
            else:
                self._leave(row)

    def _launch(self, ahead: Collection[int] = ()) -> tuple[dict[int, Request], Launched | None]:
        """A step, if it is one for a row that is not in ``ahead``; and whose tokens it brings."""
        behind = {row: request for row, request in self._active.items() if row not in ahead}
        return behind, self.rows.launch(all(r.sampling.plain for r in self._active.values())) if behind else None

    def _runs_ahead(self) -> bool:
        """May the rows take a step more before the last one is read? Not where their state is wanted, nor when all end with this one."""
        requests = self._active.values()
        exact = self._on_trial is None and not self.prefixes.capacity and all(request.may_run_ahead for request in requests)
        return self.rows.run_ahead and exact and any(len(r.tokens) + 1 < r.sampling.max_new_tokens for r in requests)

    def _recover(self, error: Exception | None = None) -> None:
        """A step was left half-way, and no row can be trusted: read all again from their tokens, one at a time until each has stepped;
        whole answers too, for their snapshots. If an interrupt comes in here, the next step begins here again."""
        with self.turn:
            guilty = error if len(self._active) == 1 else None
            for row, request in list(self._active.items()):
                ended = request.settle(self.eos)
                if guilty is not None and not ended:
                    request.finish("error", guilty)
                elif ended and not request.keep:
                    request.finish()
                elif not request.done and request not in self._again:
                    self._again.append(request)
                del self._active[row]
            self._on_trial = None
            self.turn.notify_all()
        self.rows.clear()
        self._under_way, self._torn = None, False

    def _ahead(self, row: int, request: Request, lookup: Lookup) -> tuple[list[LayerState], int, bool] | None:
        """Several tokens at once for a row that speculates: (its states, the token to read next, is that the last?); None for no guess."""
        guess = lookup.guess(min(request.sampling.speculate, request.sampling.max_new_tokens - len(request.tokens) - 1))
        checked = guess and check_guess(self.passes, self.rows.take(row), int((request.tokens or request.text_before)[-1]), guess)
        if not checked:
            return None
        with self.turn:
            request.drafted += len(guess)
            used = 0
            for token in checked.tokens:
                used += 1
                if last := request.add(token, self.eos):
                    break
            request.accepted += sum(token == guessed for token, guessed in zip(checked.tokens[:used], guess, strict=False))
        return checked.states(used), token, last

    def _leave(self, row: int, reason: FinishReason | None = None) -> None:
        """The row's request is done, and with it the row."""
        request, error = self._active[row], None
        try:
            if request.keep or (self.prefixes.capacity and request.after is None):
                request.remember(self.rows.take(row))
        except Exception as caught:
            reason, error = "error", caught
        self._finish(request, reason, error)

    def _finish(self, request: Request, reason: FinishReason | None = None, error: Exception | None = None) -> None:
        with self.turn:
            request.finish(reason, error)
            self._let_go(request)
            self.turn.notify_all()

    def _let_go(self, request: Request) -> None:
        for row in [row for row, other in self._active.items() if other is request]:
            del self._active[row]
        self._incoming = None if self._incoming is request else self._incoming
        self._on_trial = None if self._on_trial is request else self._on_trial

    # What a request may be. -----------------------------------------------------------------------------------------------------------

    def check(self, tokens: Tokens, new: int, after: Snapshot | None) -> None:
        """ValueError unless ``tokens`` can be read after a snapshot, and answered with ``new`` ones."""
        if after is not None:
            after.check_model(self.model, self.fingerprint)
        check_prompt(tokens, new, 0 if after is None else len(after), self.model.config.vocab_size, self.max_context)
