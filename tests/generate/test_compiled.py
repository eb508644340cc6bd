"""The compiled engine: the same tokens, one compilation a kind of block, and states that are written into and not copied."""

import functools

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fastweights.generate import Engine, Sampling
from fastweights.generate.passes import SHORT
from fastweights.generate.reading import Reading
from fastweights.write import WRITE_RULES
from tests.generate.common import assert_greedy, greedy, model, prompt
from tests.layers.mixers import tensors_of
from tests.models.tiny import tiny_model

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # torch's compiler, of a part of torch
]

LENGTHS = (7, 1, SHORT + 40, 2 * SHORT + 30, SHORT + 1)
"""Short pieces, full chunks, and pieces of several lengths that are compiled."""
CASES = [("kla+ccq", "aot_eager")] + [
    pytest.param(*case, marks=pytest.mark.full)
    for case in (
        ("gla", "aot_eager"),
        ("all of CCQ", "aot_eager"),
        ("grouped, no conv, no MLP", "aot_eager"),
        ("1/t", "aot_eager"),
        ("kla+ccq", "inductor"),
        ("hybrid", "inductor"),
    )
]
"""What is compiled, and by what: up to torch's own kernels, which takes a moment, or into kernels of its own."""


def build(kind, **arguments) -> Engine:
    return Engine(model(kind), **{"rows": 3, "prefill_chunk": SHORT + 8, "max_context": 400, "compile": True} | arguments)


@pytest.mark.parametrize("kind, backend", CASES)
def test_tokens_are_those_of_the_engine_and_of_generate(kind, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    counters.clear()
    engine, plain = build(kind), build(kind, compile=False)
    prompts = [prompt(n) for n in LENGTHS]
    for p, answer in zip(prompts, engine.generate(prompts, greedy(12)), strict=True):
        assert_greedy(model(kind), p, answer, 12)
    sampled = [Sampling(max_new_tokens=12, temperature=1.2, top_k=20, repetition_penalty=1.1, seed=n) for n in LENGTHS]
    for answer, expected in zip(engine.generate(prompts, sampled), plain.generate(prompts, sampled), strict=True):
        assert answer.tokens == expected.tokens
    blocks = set(model(kind).config.mixers)
    expected = len(blocks) + 2 * len(blocks - {"softmax"}) + 3  # steps, both parts of reading; last norm, likeliest token, drawn token
    assert counters["stats"]["unique_graphs"] == expected, "something is compiled again for a row, a length or a place"
    assert not counters["graph_break"]
    Reading(engine.passes, engine.prefill_chunk, np.array(prompts[3])).go_on()  # as a benchmark does, outside of inference mode
    assert counters["stats"]["unique_graphs"] == expected


@pytest.mark.full
def test_every_kind_of_block_has_a_compilation_of_its_own(monkeypatch):
    """torch compiles one function eight times at most, and a model may mix more kinds than that."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    mixers = [*WRITE_RULES, "kla+ccq"]
    mixed, text = tiny_model(mixer=mixers, num_hidden_layers=len(mixers)), prompt(SHORT + 3)
    answers = [Engine(mixed, rows=1, prefill_chunk=SHORT + 8, compile=c).submit(text, greedy(3)).result() for c in (True, False)]
    assert answers[0].tokens == answers[1].tokens


@pytest.mark.full
def test_what_follows_a_snapshot_follows_the_text_bit_for_bit(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    engine = build("kla+ccq")
    text, more = prompt(3 * SHORT), prompt(SHORT + 9, seed=5)
    whole = engine.submit([*text, *more], greedy(4), keep=True).result()
    parts = engine.submit(more, greedy(4), after=engine.remember(text), keep=True).result()
    assert parts.tokens == whole.tokens
    for a, b in zip(tensors_of(parts.snapshot.states), tensors_of(whole.snapshot.states), strict=True):
        assert torch.equal(a, b)


@pytest.mark.full
def test_a_step_copies_no_memory():
    """It writes into them where they lie: in the code that the compiler makes, nothing of their size is allocated."""
    engine = Engine(tiny_model(dtype=torch.bfloat16, mixer="kla+ccq"), rows=5, prefill_chunk=SHORT - 1, compile=True)
    addresses = [t.data_ptr() for t in tensors_of(engine.rows.states)]
    with torch.inference_mode():
        _, code = run_and_get_code(engine.rows._step, plain=True)
        before = [t.clone() for t in tensors_of(engine.rows.states)]
        engine.rows._step(plain=True)
    assert [t.data_ptr() for t in tensors_of(engine.rows.states)] == addresses
    assert not any(torch.equal(t, old) for t, old in zip(tensors_of(engine.rows.states), before, strict=True))
    (step,) = (graph for graph in code if "delta_step_torch_.default(" in graph)
    allocated = [line for line in step.splitlines() if "= empty_strided_cpu(" in line]
    shape = str(tuple(engine.rows.states[0].memory.shape))
    assert allocated and not [line for line in allocated if shape in line]
