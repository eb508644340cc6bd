"""Under load: many at once, some cancelled, some impossible, some that make the model fail. Every answer is right or a clear error."""

import functools
import gc
import sys
import threading

import pytest
import torch

from fastweights.generate import Engine, QueueFull, Request, Sampling
from fastweights.generate.rows import Launched, Rows
from fastweights.generate.text import TextStream
from fastweights.train.tokenizer import byte_tokenizer
from tests.generate.common import assert_greedy, engine, generated, greedy, model, prompt, text_engine
from tests.layers.mixers import tensors_of
from tests.models.tiny import tiny_model


def unique(n) -> list[int]:
    """A prompt that tells whose it is: no other has its first two tokens, and the answer depends on them."""
    return [n % 61, n // 61, *prompt(1 + n % 7)]


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_sixty_four_at_once_a_quarter_cancelled_and_impossible_ones_between(ahead):
    decoder = engine(rows=8, queue=64)
    decoder.rows.run_ahead = ahead
    answers, refused, lock = {}, [], threading.Lock()

    def ask(n):
        request = decoder.submit(unique(n), greedy(12))
        if n % 4 == 3:  # leave in the middle
            decoder.work_until(lambda: len(request.tokens) >= 4 or request.done)
            request.cancel()
        answer = request.result()
        with lock:
            answers[n] = answer

    def ask_for_the_impossible(n):
        for bad in ([], [1] * 200, [61]):
            try:
                decoder.submit(bad, greedy(12))
            except ValueError as error:
                refused.append(str(error))
        try:
            decoder.submit([1], Sampling(temperature=-1.0))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(64)]
    threads += [threading.Thread(target=ask_for_the_impossible, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert len(answers) == 64 and len(refused) == 32 and not decoder.busy
    for told in ("empty", "max_context=120", "tokens from 61 to 61", "temperature=-1.0"):
        assert sum(told in text for text in refused) == 8
    for n, answer in answers.items():
        if n % 4 == 3:
            assert answer.finish_reason == "cancelled" and 4 <= len(answer.tokens) < 12
            assert list(answer.tokens) == generated(model(), unique(n), 12)[: len(answer.tokens)]
        else:
            assert_greedy(model(), unique(n), answer, 12)
    assert len({answer.tokens for answer in answers.values()}) > 50, "answers that are alike could be mixed up unseen"


def test_a_step_ahead_changes_no_answer(monkeypatch):
    """As on a GPU, where the next step is launched before the last one is read: rows that end early or late, that others take over at once,
    that are sampled, cancelled, kept or guessed ahead in between."""
    launches = []
    monkeypatch.setattr(Rows, "launch", lambda self, plain, launch=Rows.launch: launches.append(plain) or launch(self, plain))
    eos = generated(model(), unique(3), 6)[3]  # one of them ends by itself
    asked = [Sampling(max_new_tokens=3 + n % 5, temperature=float(n % 3 == 1), seed=n) for n in range(9)]
    runs = []
    for ahead in (True, False):
        decoder = engine(rows=2)
        decoder.rows.run_ahead, decoder.eos = ahead, frozenset([eos])
        requests = [decoder.submit(unique(n), how) for n, how in enumerate(asked)]
        kept = decoder.submit(unique(20), greedy(4), keep=True)
        requests += [kept, decoder.submit(unique(3), greedy(9)), decoder.submit(unique(21), greedy(6, speculate=2))]
        left = decoder.submit(unique(22), greedy(50))
        decoder.work_until(lambda left=left: len(left.tokens) > 5)
        left.cancel()
        runs.append([(answer.tokens, answer.finish_reason, answer.error) for answer in [request.result() for request in requests]])
        more = decoder.submit([5], greedy(3), after=kept.snapshot).result()
        runs[-1].append((more.tokens, more.finish_reason, more.error))
        assert not decoder.busy
    assert runs[0] == runs[1]
    assert {reason for _, reason, _ in runs[0]} == {"length", "eos"}
    ahead_of_time = len(launches)
    decoder.submit(unique(1), greedy(7)).result()
    assert len(launches) == ahead_of_time + 7
    decoder.rows.run_ahead = True
    decoder.submit(unique(1), greedy(7)).result()
    assert len(launches) == ahead_of_time + 14, "when all end with a step, none follows it"


def test_a_burst_on_a_full_queue():
    """What does not fit is told so at once, and what fits is answered."""
    decoder = engine(rows=2, queue=4)
    taken, full = [], 0
    for n in range(12):
        try:
            taken.append((n, decoder.submit(unique(n), greedy(4))))
        except QueueFull:
            full += 1
    assert len(taken) == 4 and full == 8
    for n, request in taken:
        assert_greedy(model(), unique(n), request.result(), 4)


def test_cancelled_before_it_began():
    decoder = engine(rows=1)
    first, second = decoder.submit(prompt(3), greedy(5)), decoder.submit(prompt(4), greedy(5))
    second.cancel()
    answer = second.result()
    assert answer.finish_reason == "cancelled" and answer.tokens == () and answer.text == ""
    long = decoder.submit(prompt(60), greedy(5))
    decoder.step()
    long.cancel()  # while its prompt is being read
    assert long.result().finish_reason == "cancelled"
    assert first.result().finish_reason == "length" and not decoder.busy


def poisoned(monkeypatch, decoder, fails):
    """Make the model fail wherever ``fails(input_ids)``."""
    embed = decoder.model.model.embed_tokens

    def forward(ids):
        if fails(ids):
            raise RuntimeError("out of memory")
        return type(embed).forward(embed, ids)

    monkeypatch.setattr(embed, "forward", forward)


def test_a_failure_while_reading_is_its_own(monkeypatch):
    decoder = engine(rows=2)
    poisoned(monkeypatch, decoder, lambda ids: (ids == 60).any())
    prompts = [prompt(3), [1, 60, 2, 3], prompt(4)]
    good, bad, other = decoder.generate(prompts, greedy(3))
    monkeypatch.undo()
    assert bad.finish_reason == "error" and "out of memory" in str(bad.error) and bad.tokens == ()
    assert_greedy(model(), prompts[0], good, 3)
    assert_greedy(model(), prompts[2], other, 3)
    decoder.tokenizer = byte_tokenizer()  # a stream has text
    request = decoder.submit([1, 60, 2, 3], greedy(2))
    poisoned(monkeypatch, decoder, lambda ids: True)
    with pytest.raises(RuntimeError, match="the model failed on this request: out of memory"):
        list(request)


def test_a_failure_while_decoding_is_found_out_by_trying_each_alone(monkeypatch):
    """One request makes the step of all rows fail. The others are read again and get the answers they would have got."""
    decoder, prompts = engine(rows=3), [unique(n) for n in range(6)]
    expected = [generated(model(), p, 8) for p in prompts]
    others = {token for n in (0, 2, 3, 4, 5) for token in [*prompts[n], *expected[n]]}
    bad = next(token for token in expected[1][2:6] if token not in others)
    poisoned(monkeypatch, decoder, lambda ids: (ids == bad).any())
    answers = decoder.generate(prompts, greedy(8))
    monkeypatch.undo()
    for n, (p, answer) in enumerate(zip(prompts, answers, strict=True)):
        if n == 1:
            assert answer.finish_reason == "error" and list(answer.tokens) == expected[1][: expected[1].index(bad) + 1]
        else:
            assert_greedy(model(), p, answer, 8)


def test_an_interrupt_in_the_middle_of_a_step_loses_nothing(monkeypatch):
    decoder, calls = engine(rows=2), []

    def interrupted(ids):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return False

    requests = [(n, decoder.submit(unique(n), Sampling(max_new_tokens=8, temperature=1.0, seed=n))) for n in range(3)]
    poisoned(monkeypatch, decoder, interrupted)
    with pytest.raises(KeyboardInterrupt):
        while decoder.step():
            pass
    answers = [request.result() for _, request in requests]
    monkeypatch.undo()
    assert [answer.error for answer in answers] == [None] * 3
    for n, answer in enumerate(answers):
        assert answer.tokens == engine().submit(unique(n), Sampling(max_new_tokens=8, temperature=1.0, seed=n)).result().tokens


def test_an_interrupt_behind_the_last_token_adds_none(monkeypatch):
    """It comes while a snapshot is made of the answer."""
    decoder, take = engine(rows=2), Rows.take
    request = decoder.submit(prompt(5), greedy(4), keep=True)

    def interrupted(self, row):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Rows, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        request.result()
    assert Rows.take is take
    answer = request.result()
    assert_greedy(model(), prompt(5), answer, 4)
    assert answer.finish_reason == "length" and len(answer.snapshot) == 9 and not decoder.busy


PARTS = {
    Engine: ("_recover", "_drop_cancelled", "_next", "_read", "_join", "_decode", "_ahead", "_leave", "_finish", "_let_go"),
    Request: ("add", "settle", "remember", "finish", "_push"),
    Rows: ("launch", "clear", "put", "put_states", "take"),
    Launched: ("read",),
    TextStream: ("push", "_hold", "_slide", "_decode"),
}
"""What a step is made of. A signal is heard where a call begins and where it has ended."""


class Interrupts:
    """Raises KeyboardInterrupt once, where the n-th of the parts begins or ends."""

    def __init__(self, monkeypatch) -> None:
        self.seen, self.n = 0, None
        for kind, names in PARTS.items():
            for name in names:
                monkeypatch.setattr(kind, name, self._heard(getattr(kind, name)))

    def _heard(self, part):
        @functools.wraps(part)
        def heard(*arguments, **keywords):
            self._count()
            result = part(*arguments, **keywords)
            self._count()
            return result

        return heard

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.n:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "fails, ahead", [(True, False), *(pytest.param(*how, marks=pytest.mark.full) for how in ((False, False), (True, True)))]
)
def test_an_interrupt_anywhere_in_a_step_costs_nothing(monkeypatch, fails, ahead):
    """Neither an answer, nor a token or piece of text of one, nor a snapshot; also inside of the recovery from an error in a step, and
    where the rows have gone on ahead."""
    prompts, asked = ["Was für", "so"], [greedy(4, stop=("never",)), greedy(3, speculate=0 if ahead else 2)]
    interrupts = Interrupts(monkeypatch)

    def ask():
        decoder, failed = text_engine(rows=2, prefixes=0 if ahead else 2), []
        decoder.rows.run_ahead = ahead
        launch = decoder.rows.launch

        def launch_or_fail(plain):
            if fails and len(decoder._active) == 2 and not failed:
                failed.append(1)
                raise RuntimeError("out of memory")
            return launch(plain)

        decoder.rows.launch = launch_or_fail
        return decoder, [decoder.submit(p, how, keep=not ahead) for p, how in zip(prompts, asked, strict=True)]

    requests = ask()[1]
    interrupts.seen = 0
    expected = [request.result() for request in requests]
    places = range(1, interrupts.seen, 17 if fails else 3)
    assert len(places) > 10
    for interrupts.n in places:
        decoder, requests = ask()
        interrupts.seen = 0
        with pytest.raises(KeyboardInterrupt):
            for request in requests:
                request.result()
        for request, whole in zip(requests, expected, strict=True):
            answer = request.result()
            assert (answer.tokens, answer.text, answer.finish_reason) == (whole.tokens, whole.text, "length")
            assert answer.error is None and (answer.snapshot is None) == ahead
            if ahead:
                continue
            assert (answer.snapshot.read, answer.snapshot.pending) == (whole.snapshot.read, whole.snapshot.pending)
            for kept, right in zip(answer.snapshot.states, whole.snapshot.states, strict=True):
                for x, y in zip(tensors_of(kept), tensors_of(right), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        assert not decoder.step()


def test_logits_that_are_not_finite_are_one_requests_error():
    broken = tiny_model(mixer="kla+ccq", tie_word_embeddings=False)
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = torch.nan
    decoder = engine(rows=3)
    decoder.model = decoder.passes.model = broken
    for speculate in (0, 2):
        good, bad, other = decoder.generate([prompt(3, seed=5), [1, 2, 7], [4, 5]], greedy(2, speculate=speculate))
        assert bad.finish_reason == "error" and "not finite" in str(bad.error)
        assert good.finish_reason == other.finish_reason == "length"
    clean = decoder.generate([prompt(3, seed=5), [4, 5], [4, 5]], greedy(2))
    assert all(answer.error is None for answer in clean), "the row that failed is as good as new"


def live() -> tuple[int, int]:
    """Tensors, and blocks of memory that Python holds."""
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()), sys.getallocatedblocks()  # isinstance would ask the object


@pytest.mark.full
@pytest.mark.timeout(900)
def test_memory_is_flat_over_two_thousand_requests():
    small = tiny_model(mixer="kla+ccq", num_hidden_layers=1, intermediate_size=0, vocab_size=258)
    decoder = Engine(small, byte_tokenizer(), rows=8, queue=32, prefixes=4, prefill_chunk=64)

    def serve(begin, end):
        for first in range(begin, end, 20):
            requests = []
            for n in range(first, first + 20):
                sampling = Sampling(max_new_tokens=1 + n % 3, temperature=float(n % 2), stop=("x",))
                requests.append(decoder.submit(f"{n % 50} question", sampling, keep=n % 5 == 0))
            for n, request in enumerate(requests):
                if n % 4 == 3:
                    request.cancel()
                request.result()

    serve(0, 200)
    tensors, blocks = live()
    serve(200, 2000)
    more_tensors, more_blocks = (after - before for after, before in zip(live(), (tensors, blocks), strict=True))
    assert more_tensors <= 5
    assert more_blocks < 900, f"{more_blocks / 1800:.2f} blocks a request are kept"


def test_rows_share_no_memory_with_what_is_kept():
    decoder = engine(rows=2)
    snapshot = decoder.submit(prompt(3), greedy(3), keep=True).result().snapshot
    kept = {x.untyped_storage().data_ptr() for state in snapshot.states for x in tensors_of(state)}
    rows = {x.untyped_storage().data_ptr() for state in decoder.rows.states for x in tensors_of(state)}
    assert not kept & rows
