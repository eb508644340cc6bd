"""Tokens are drawn with the right probabilities, and depend on the seed and on nothing else."""

import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as theirs

from fastweights.generate import Sampling
from fastweights.generate.draw import Dials, draw, uniform

VOCABULARY = 9


def drawn(logits, sampling, draws, seen=None, seed=0):
    """``draws`` tokens from one row of logits, each the next of one request."""
    dials = Dials.of(draws, torch.device("cpu"))
    for row in range(draws):
        dials.set(row, sampling, seed, row)
    seen = torch.zeros(len(logits), dtype=torch.bool) if seen is None else seen
    return draw(logits.expand(draws, -1), seen.expand(draws, -1), dials)


def expected(logits, sampling, seen):
    """The probabilities, by transformers' own processors in its order."""
    ids = seen.nonzero().T
    chain = [theirs.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)] if seen.any() else []
    chain += [theirs.TemperatureLogitsWarper(sampling.temperature)]
    chain += [theirs.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    chain += [theirs.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    chain += [theirs.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits.unsqueeze(0)
    for process in chain:
        scores = process(ids, scores)
    return scores[0].double().softmax(-1)


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 2.5, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 0.8, "repetition_penalty": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 100},
]


@pytest.mark.parametrize(
    "arguments", [pytest.param(a, marks=() if i in (5, 7) else pytest.mark.full) for i, a in enumerate(SETTINGS)], ids=str
)
def test_tokens_come_as_often_as_their_probability_says(arguments):
    logits = 2 * torch.randn(VOCABULARY)
    seen = torch.tensor([True, False, True] + [False] * (VOCABULARY - 3)) & (arguments.get("repetition_penalty", 1) != 1)
    sampling, draws = Sampling(**arguments), 20_000
    p = expected(logits, sampling, seen)
    counts = drawn(logits, sampling, draws, seen).bincount(minlength=VOCABULARY)
    assert not counts[p == 0].any()
    counts, p = counts[p > 0], p[p > 0]
    assert len(p) == 1 or stats.chisquare(counts.numpy(), (p * draws).numpy()).pvalue > 1e-3


def test_each_row_has_its_own_settings():
    logits = torch.randn(6, 50)
    every = [Sampling(**arguments) for arguments in ({}, *SETTINGS[:5])]
    dials = Dials.of(6, torch.device("cpu"))
    for row, sampling in enumerate(every):
        dials.set(row, sampling, seed=row, drawn=3)
    seen = torch.rand(6, 50) < 0.3
    together = draw(logits, seen, dials)
    for row in range(6):
        alone = draw(logits[row : row + 1], seen[row : row + 1], Dials(*(dial[row : row + 1] for dial in dials)))
        assert alone == together[row]
    assert together[0] == logits[0].argmax()


def test_greedy_with_a_penalty():
    logits, seen = torch.tensor([3.0, 2.9, -1.0]), torch.tensor([True, False, False])
    assert drawn(logits, Sampling(repetition_penalty=1.1), 1, seen) == 1
    assert drawn(logits, Sampling(), 1, seen) == 0
    assert drawn(torch.tensor([-3.0, -3.1, -9.0]), Sampling(repetition_penalty=1.1), 1, seen) == 1


def test_the_random_numbers_are_uniform_and_independent():
    seeds, draws = torch.arange(200), torch.arange(200)
    u = uniform(seeds.repeat_interleave(200), draws.repeat(200)).view(200, 200)
    assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == u.numel()
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3
    for x, y in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u[1:, :-1], u[:-1, 1:])):  # the next draw, the next seed, one against the other
        assert abs(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]) < 4 / 200
    large = uniform(torch.tensor([2**63 - 1]), torch.tensor([10**9]))
    assert 0 <= large < 1


def test_the_generator_is_the_published_one():
    """SplitMix64 from state 0, by Python's own integers: the reference stream begins e220a8397b1dcdaf, 6e789e6aa1b965f4."""
    from fastweights.generate.draw import _mixed

    golden = 0x9E3779B97F4A7C15
    states = torch.tensor([golden - 2**64, 2 * golden % 2**64])
    assert [x % 2**64 for x in _mixed(states).tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_logits_that_are_not_numbers_do_no_harm():
    dials = Dials.of(2, torch.device("cpu"))
    for row in range(2):
        dials.set(row, Sampling(temperature=1.0), 0, 0)
    logits = torch.stack([torch.full((5,), torch.nan), torch.tensor([0.0, 0.0, 50.0, 0.0, 0.0])])
    tokens = draw(logits, torch.zeros(2, 5, dtype=torch.bool), dials)
    assert 0 <= tokens[0] < 5 and tokens[1] == 2


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e-9}, "temperature=1e-09"),
        ({"top_k": -3}, "top_k=-3"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.2}, "top_p=1.2"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": 1e39}, "repetition_penalty=1e\\+39"),
        ({"top_k": 2**63}, "top_k=9223372036854775808"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"stop": "abc"}, "stop='abc'"),
        ({"stop": ("a", "")}, "stop="),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"speculate": -1}, "speculate=-1"),
        ({"speculate": 2, "temperature": 0.5}, "needs greedy decoding"),
    ],
)
def test_settings_that_mean_nothing(arguments, told):
    with pytest.raises(ValueError, match=told):
        Sampling(**arguments)
