"""Answers are those of transformers' ``generate``, whatever stands in the batch, however prompts are cut, whoever joins and leaves."""

import asyncio
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.generate import Engine, QueueFull, Sampling
from fastweights.generate.prompts import prompt_tokens
from fastweights.ops import checks
from tests.generate.common import KINDS, assert_greedy, engine, generated, greedy, model, prompt, text_engine, text_model
from tests.layers.mixers import tensors_of
from tests.models.tiny import kinds, tiny_model

LENGTHS = (7, 1, 12, 30, 2)


@pytest.mark.parametrize("kind", kinds(KINDS, quick=("hybrid",)))
def test_tokens_are_those_of_generate(kind):
    """Five uneven prompts in three rows: rows are handed on in the middle of others' answers."""
    prompts = [prompt(n) for n in LENGTHS]
    for speculate in (0, 3):
        answers = engine(kind).generate(prompts, [greedy(12 + n % 5, speculate=speculate) for n in LENGTHS])
        for n, p, answer in zip(LENGTHS, prompts, answers, strict=True):
            assert_greedy(model(kind), p, answer, 12 + n % 5)
            assert answer.finish_reason == "length" and answer.accepted <= answer.drafted and bool(answer.drafted) <= bool(speculate)
    assert len({token for answer in answers for token in answer.tokens}) > 10, "these models repeat themselves, and notice nothing"


def test_shapes_are_what_the_signatures_say(checked):
    sampled = Sampling(temperature=1.0, top_k=5, repetition_penalty=1.1, max_new_tokens=3)
    decoder = engine("hybrid", prefixes=2)
    for answer in decoder.generate([prompt(7), prompt(7)], [sampled, greedy(3, speculate=2)], after=decoder.remember(prompt(3))):
        assert len(answer.tokens) == 3


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kla+ccq", "gla", "hybrid"])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    chunk=st.integers(1, 30),
    rows=st.integers(1, 4),
    speculate=st.integers(0, 5),
    prefixes=st.integers(0, 4),
)
def test_tokens_do_not_depend_on_how_the_engine_is_built(kind, lengths, chunk, rows, speculate, prefixes):
    prompts = [prompt(n, seed=n % 3) for n in lengths]  # some begin alike
    decoder = engine(kind, rows=rows, prefill_chunk=chunk, prefixes=prefixes)
    for p, answer in zip(prompts, decoder.generate(prompts, greedy(9, speculate=speculate)), strict=True):
        assert_greedy(model(kind), p, answer, 9)


def test_a_request_among_others_draws_what_it_draws_alone():
    """Bit for bit: a row knows neither its neighbours nor when it joined."""
    sampled = Sampling(max_new_tokens=15, temperature=1.3, top_p=0.9, repetition_penalty=1.2, seed=5)
    alone = engine().submit(prompt(9), sampled).result()
    others = [greedy(4), Sampling(max_new_tokens=30, temperature=2.0), greedy(11, speculate=2), Sampling(temperature=1.0, max_new_tokens=3)]
    for at in (0, 2, 4):
        batch = [(prompt(n), how) for n, how in zip((3, 17, 8, 1), others, strict=True)]
        batch.insert(at, (prompt(9), sampled))
        answers = engine().generate([p for p, _ in batch], [how for _, how in batch])
        assert answers[at].tokens == alone.tokens
    assert engine().submit(prompt(9), Sampling(**vars(sampled) | {"seed": 6})).result().tokens != alone.tokens


def test_end_of_text_ends_an_answer():
    plain = generated(model(), prompt(9), 20)
    end = plain[7]
    assert end not in plain[:7]
    decoder = engine()
    decoder.eos = frozenset([end])
    answer = decoder.submit(prompt(9), greedy()).result()
    assert answer.tokens == tuple(plain[:8]) and answer.finish_reason == "eos"
    answer = decoder.submit(prompt(9), greedy(ignore_eos=True)).result()
    assert answer.tokens == tuple(plain) and answer.finish_reason == "length"
    ending = tiny_model(eos_token_id=[end, 0])
    assert Engine(ending).eos == {end, 0} and text_engine().eos == {256} and Engine(model()).eos == frozenset()


def test_text_in_text_out_and_in_pieces():
    decoder = text_engine()
    answer = decoder.generate(["Was für ein Tag"], greedy(40))[0]
    assert answer.text == decoder.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert "".join(decoder.stream("Was für ein Tag", greedy(40))) == answer.text
    assert answer.prompt_tokens == len("Was für ein Tag".encode())
    with pytest.raises(ValueError, match="needs a tokenizer"):
        next(engine().stream(prompt(3), greedy()))
    with pytest.raises(ValueError, match="single string"):
        decoder.generate("Was für ein Tag")


def test_a_stream_that_is_left_frees_its_row():
    decoder = text_engine(rows=1)
    for _piece in decoder.stream("a", greedy(10_000)):
        break
    answer = decoder.submit("b", greedy(5)).result()
    assert answer.finish_reason == "length" and not decoder.busy


def test_stop_strings_end_where_generate_ends():
    decoder, text = text_engine(), "The answer"
    plain = decoder.submit(text, greedy(60)).result()
    readable = [i for i, c in enumerate(plain.text) if c.isascii()]
    at = next(i for i in readable if i > 3 and i + 1 in readable)
    stop = plain.text[at : at + 2]
    answer = decoder.submit(text, greedy(60, stop=("never there", stop))).result()
    assert answer.finish_reason == "stop" and answer.text == plain.text[: plain.text.index(stop)]
    assert "".join(decoder.stream(text, greedy(60, stop=(stop,)))) == answer.text
    pieces = list(decoder.stream(text, greedy(60, stop=("never there",))))
    assert len(pieces) > 10 and "".join(pieces) == plain.text, "text comes as it is written, stop strings or not"
    ids = list(text.encode())
    expected = generated(text_model(), ids, 60, stop_strings=[stop], tokenizer=decoder.tokenizer)
    assert list(answer.tokens) == expected


BAD = [
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [3, 61]}, "tokens from 3 to 61; the model's are 0 to 60"),
    ({"prompt": [-1]}, "tokens from -1 to -1"),
    ({"prompt": "text"}, "no tokenizer"),
    ({"prompt": [1] * 101, "sampling": Sampling(max_new_tokens=20)}, "101 tokens .* max_new_tokens=20 make 121; .* max_context=120"),
    ({"prompt": [1], "sampling": Sampling(stop=("x",))}, "no tokenizer"),
]


@pytest.mark.parametrize("arguments, told", BAD)
def test_what_cannot_be_asked_is_refused(arguments, told):
    decoder = engine()
    with pytest.raises(ValueError, match=told):
        decoder.submit(**arguments)
    assert not decoder.busy


@pytest.mark.parametrize(
    "tokens, told",
    [
        ([[1, 2]], r"shape \[1, 2\]"),
        ([0.5], "float64"),
        (7, r"shape \[\]"),
        (["a"], "<U1"),
        (torch.ones(2, dtype=torch.bfloat16), "BFloat16"),
        (torch.ones(2, dtype=torch.int64, device="meta"), "meta"),
    ],
)
def test_what_is_no_prompt(tokens, told):
    with pytest.raises(ValueError, match=told):
        prompt_tokens(tokens, None, begins=True)
    assert prompt_tokens(torch.tensor([1, 2]), None, begins=True).tolist() == [1, 2]


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"rows": 0}, "rows=0"),
        ({"queue": 0}, "queue=0"),
        ({"prefill_chunk": -1}, "prefill_chunk=-1"),
        ({"prefixes": -1}, "prefixes=-1"),
        ({"max_context": 0}, "max_context=0"),
    ],
)
def test_an_engine_that_cannot_be(arguments, told):
    with pytest.raises(ValueError, match=told):
        engine(**arguments)


def test_models_that_an_engine_cannot_decode_with():
    with pytest.raises(ValueError, match="give max_context"):
        engine("softmax", max_context=None)
    with pytest.raises(ValueError, match="in-place"):
        Engine(tiny_model(backend="reference"))


def test_a_full_queue_says_so():
    decoder = engine(rows=1, queue=2)
    waiting = [decoder.submit(prompt(3), greedy(5)) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting, and queue=2"):
        decoder.submit(prompt(3), greedy(5))
    assert [request.result().finish_reason for request in waiting] == ["length"] * 2
    assert len(decoder.generate([prompt(3)] * 7, greedy(5))) == 7  # more than queue and rows hold: they are fed as there is room


def test_many_threads_and_one_engine():
    decoder = engine(rows=2, queue=100)
    answers = {}

    def ask(n):
        answers[n] = decoder.submit(prompt(n), greedy(6)).result()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(answers) == 8 and not decoder.busy
    for n, answer in answers.items():
        assert_greedy(model(), prompt(n), answer, 6)


def test_asyncio_and_one_engine():
    decoder = text_engine()

    async def read(text):
        return "".join([piece async for piece in decoder.submit(text, greedy(20))])

    async def main():
        return await asyncio.gather(*map(read, ("one", "two", "three", "four")))

    assert asyncio.run(main()) == [answer.text for answer in text_engine().generate(["one", "two", "three", "four"], greedy(20))]


def test_step_by_step():
    decoder = engine()
    assert not decoder.step()
    request = decoder.submit(prompt(3), greedy(4))
    steps = 0
    while decoder.step():
        steps += 1
    assert request.done and steps == 3 and len(request.result().tokens) == 4


class Watch(TorchDispatchMode):
    """The operations that run, with the shapes of what they make, and the size of the largest."""

    def __init__(self):
        super().__init__()
        self.operations, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
        self.operations.append((func, [x.shape for x in tensors]))
        self.largest = max([self.largest, *(x.numel() for x in tensors)])
        return out


@pytest.mark.parametrize("kind", kinds(KINDS, quick=("kla+ccq", "hybrid")))
@pytest.mark.parametrize("plain", [True, False])
def test_a_step_is_always_the_same_and_never_waits_for_the_device(kind, plain, monkeypatch):
    """What a CUDA graph needs: the same operations on the same tensors, and none that hands a value to the host."""
    monkeypatch.setattr(checks, "readable", lambda *_: False)  # as on a CUDA device
    decoder = engine(kind)
    how = greedy(6) if plain else Sampling(max_new_tokens=6, temperature=1.0, top_k=5, seed=1)

    def step():
        with torch.inference_mode(), Watch() as watch:
            decoder.rows._step(plain)
        return watch.operations

    def tensors():
        rows = decoder.rows
        return [x.data_ptr() for x in (rows.token, rows.seen, rows.output, *rows.dials, *(t for s in rows.states for t in tensors_of(s)))]

    first, places = step(), tensors()
    decoder.generate([prompt(n) for n in (3, 30, 1, 7)], how)
    assert step() == first and tensors() == places
    assert not {func for func, _ in first} & {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


@pytest.mark.full
def test_reading_needs_no_more_memory_for_a_longer_text():
    """The largest tensor that reading makes is a chunk's, and what lives between chunks is the state."""

    def largest(length):
        decoder = engine(prefill_chunk=64, max_context=None)
        with Watch() as watch:
            decoder.remember(prompt(length))
        return watch.largest

    assert largest(3200) == largest(320)
