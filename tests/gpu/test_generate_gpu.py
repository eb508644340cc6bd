"""The engine on a card: steps in CUDA graphs give the tokens of ``generate``, and rows are as independent there."""

import pytest
import torch

from fastweights.generate import Engine, Sampling
from tests.generate.common import KINDS, assert_same, generated, prompt
from tests.models.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_graphs_are_those_of_generate(kind):
    model, cpu = tiny_model(**KINDS[kind]).cuda(), tiny_model(**KINDS[kind])
    decoder = Engine(model, rows=3, prefill_chunk=16, max_context=120)
    assert len(decoder.rows.graphs) == 2
    prompts = [prompt(n) for n in (7, 1, 12, 30, 2)]
    for speculate in (0, 3):
        for p, answer in zip(prompts, decoder.generate(prompts, Sampling(max_new_tokens=20, speculate=speculate)), strict=True):
            assert answer.error is None
            assert_same(cpu, p, answer.tokens, generated(cpu, p, 20))


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
