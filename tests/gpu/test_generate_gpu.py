"""The engine on a card: steps in CUDA graphs give the tokens of ``generate``, and rows are as independent there."""

import os

import pytest
import torch
from torch._dynamo.utils import counters

from fastweights.generate import Engine, Sampling
from tests.generate.common import KINDS, assert_same, generated, prompt
from tests.layers.mixers import tensors_of
from tests.models.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


needs_no_shape_checks = pytest.mark.skipif(
    os.environ.get("FASTWEIGHTS_SHAPE_CHECKS", "1") != "0", reason="the shape checker breaks torch.compile: FASTWEIGHTS_SHAPE_CHECKS=0"
)


def compilers_own_warnings(test):
    """Of its own parts, and its advice to multiply in TF32, which these tests do without."""
    for warning in ("ignore::DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning"):
        test = pytest.mark.filterwarnings(warning)(test)
    return test


COMPILED = ("kla+ccq", "gla", "hybrid", "grouped, no conv, no MLP")


@pytest.mark.parametrize(
    "kind, compile", [(kind, False) for kind in KINDS] + [pytest.param(kind, True, marks=needs_no_shape_checks) for kind in COMPILED]
)
@compilers_own_warnings
def test_tokens_in_graphs_are_those_of_generate(kind, compile):
    model, cpu = tiny_model(**KINDS[kind]).cuda(), tiny_model(**KINDS[kind])
    decoder = Engine(model, rows=3, prefill_chunk=16, max_context=120, compile=compile)
    assert len(decoder.rows.graphs) == 2
    prompts = [prompt(n) for n in (7, 1, 12, 30, 2)]
    for speculate in (0, 3):
        for p, answer in zip(prompts, decoder.generate(prompts, Sampling(max_new_tokens=20, speculate=speculate)), strict=True):
            assert answer.error is None
            assert_same(cpu, p, answer.tokens, generated(cpu, p, 20))


@needs_no_shape_checks
@pytest.mark.parametrize("kind", COMPILED)
@compilers_own_warnings
def test_pieces_of_any_length_are_compiled_once(kind):
    """Longer than the compiler's shortest, in full chunks and not; and a step copies no state."""
    model, cpu = tiny_model(**KINDS[kind]).cuda(), tiny_model(**KINDS[kind])
    counters.clear()
    decoder = Engine(model, rows=2, prefill_chunk=100, max_context=400, compile=True)
    addresses = [t.data_ptr() for t in tensors_of(decoder.rows.states)]
    compiled = counters["stats"]["unique_graphs"]
    prompts = [prompt(n) for n in (80, 100, 101, 265)]
    for p, answer in zip(prompts, decoder.generate(prompts, Sampling(max_new_tokens=20)), strict=True):
        assert answer.error is None
        assert_same(cpu, p, answer.tokens, generated(cpu, p, 20))
    assert counters["stats"]["unique_graphs"] == compiled
    assert [t.data_ptr() for t in tensors_of(decoder.rows.states)] == addresses


@needs_no_shape_checks
@pytest.mark.parametrize("kind", ["kla+ccq", "gla", "mamba2"])
@compilers_own_warnings
def test_a_captured_piece_is_the_piece(kind):
    """To the bit; and states that were handed out are written into by no later one."""
    passes = Engine(tiny_model(**KINDS[kind]).cuda(), rows=1, prefill_chunk=100, compile=True).passes
    states, seen = passes.initial_states(), []
    for seed in range(3):
        tokens = prompt(100, seed=seed)
        hidden, after = passes.read(tokens, states)
        with torch.inference_mode():
            plain, expected = passes._read(torch.tensor([tokens]).cuda(), states)
        assert torch.equal(hidden, plain)
        assert all(map(torch.equal, tensors_of(after), tensors_of(expected)))
        seen.append((after, [x.clone() for x in tensors_of(after)]))
        states = after
    assert passes._piece is not None
    for after, then in seen:
        assert all(map(torch.equal, tensors_of(after), then))


@needs_no_shape_checks
@compilers_own_warnings
def test_a_compiled_request_among_others_draws_what_it_draws_alone():
    decoder = Engine(tiny_model(mixer="kla+ccq").cuda(), rows=4, prefill_chunk=16, compile=True)
    sampled = Sampling(max_new_tokens=30, temperature=1.2, top_k=40, seed=3)
    alone = decoder.submit(prompt(9), sampled).result().tokens
    together = decoder.generate([prompt(3), prompt(9)], [Sampling(max_new_tokens=9, temperature=2.0), sampled])
    assert together[1].tokens == alone


def test_a_request_among_others_draws_what_it_draws_alone():
    decoder = Engine(tiny_model(mixer="kla+ccq").cuda(), rows=4, prefill_chunk=16)
    sampled = Sampling(max_new_tokens=30, temperature=1.2, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=3)
    alone = decoder.submit(prompt(9), sampled).result().tokens
    others = [Sampling(max_new_tokens=n, temperature=2.0) for n in (5, 40, 17)]
    together = decoder.generate([prompt(3), prompt(20), prompt(9), prompt(4)], [others[0], others[1], sampled, others[2]])
    assert together[2].tokens == alone


def test_a_snapshot_goes_to_the_cpu_and_back(tmp_path):
    decoder = Engine(tiny_model(mixer="kla+ccq").cuda(), rows=2, prefill_chunk=16)
    snapshot = decoder.remember(prompt(50))
    snapshot.save(tmp_path / "memory.fw")
    answers = [
        decoder.submit([1, 2], Sampling(max_new_tokens=20), after=memory).result().tokens
        for memory in (snapshot, type(snapshot).load(tmp_path / "memory.fw"))
    ]
    assert answers[0] == answers[1] == decoder.submit([*prompt(50), 1, 2], Sampling(max_new_tokens=20)).result().tokens
