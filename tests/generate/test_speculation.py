"""Guessed tokens are those that plain decoding gives, and after a wrong guess the memory is as if it had never been made."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.generate import Engine
from fastweights.generate.lookup import GRAMS, Lookup
from tests.generate.common import assert_greedy, assert_same, engine, greedy, model, prompt, text_engine
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def repeating():
    """A model that writes in circles and leaves them again: some guesses are right and some wrong."""
    return tiny_model(mixer="kla+ccq", seed=10, num_heads=1, num_hidden_layers=1, intermediate_size=0)


def test_what_followed_last_time_is_guessed():
    lookup = Lookup()
    lookup.extend([1, 2, 3, 4, 5, 1, 2])
    assert lookup.guess(3) == [3, 4, 5] and lookup.guess(1) == [3] and lookup.guess(0) == []
    assert lookup.guess(12) == [3, 4, 5, 1, 2] * 2 + [3, 4]
    lookup.extend([9, 1, 2])
    assert lookup.guess(2) == [9, 1], "the latest of two"
    lookup.extend([7, 4, 5, 1, 2])
    assert lookup.guess(1) == [9], "of 4 5 1 2, not of 1 2 alone, which 7 followed"
    lookup.extend([0])
    assert lookup.guess(3) == []


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=40), count=st.integers(0, 5))
def test_guesses_by_the_definition(tokens, count):
    lookup = Lookup()
    lookup.extend(tokens)
    for n in GRAMS:
        ends = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
        if ends:
            assert lookup.guess(count) == (tokens[ends[-1] :] * 5)[:count]
            return
    assert lookup.guess(count) == []


def test_right_guesses_save_steps(repeating):
    p = prompt(6)
    plain = Engine(repeating, rows=1).submit(p, greedy(60)).result()
    decoder = Engine(repeating, rows=1)
    request, steps = decoder.submit(p, greedy(60, speculate=6)), 0
    while decoder.step():
        steps += 1
    answer = request.result()
    assert_same(repeating, p, answer.tokens, plain.tokens)
    assert answer.accepted > 20 and steps <= 60 - answer.accepted, "each accepted token is a step less"
    assert answer.drafted > answer.accepted, "and some guesses were wrong"
    assert plain.drafted == plain.accepted == 0


@pytest.mark.parametrize("new", [1, 2, 7, 20, 33])
def test_the_memory_after_an_answer_is_the_same(repeating, new):
    """Rolled back to the token, whatever was guessed beyond; also where the answer ends within a guess."""
    p = prompt(6)
    decoder = Engine(repeating, rows=2)
    plain, guessed = (decoder.submit(p, greedy(new, speculate=n), keep=True).result() for n in (0, 5))
    assert guessed.tokens == plain.tokens and len(guessed.snapshot) == len(plain.snapshot)
    assert guessed.snapshot.pending == plain.snapshot.pending and torch.equal(guessed.snapshot.seen, plain.snapshot.seen)
    for one, other in zip(guessed.snapshot.states, plain.snapshot.states, strict=True):
        assert torch.equal(one.place, other.place)
        torch.testing.assert_close(one.memory, other.memory, rtol=1e-4, atol=1e-5)
    ways = [decoder.submit(prompt(4), greedy(10), after=answer.snapshot).result().tokens for answer in (plain, guessed)]
    assert_same(repeating, [*p, *plain.tokens, *prompt(4)], *ways)


def test_an_answer_ends_within_a_guess(repeating):
    p = prompt(6)
    plain = Engine(repeating, rows=1).submit(p, greedy(60)).result().tokens
    for at in (30, 31, 32, 33):  # among them one in the middle of a block
        decoder = Engine(repeating, rows=1)
        decoder.eos = frozenset([plain[at]])
        answer = decoder.submit(p, greedy(60, speculate=6), keep=True).result()
        end = plain.index(plain[at])
        assert answer.tokens == plain[: end + 1] and answer.finish_reason == "eos"
        assert answer.snapshot.pending == (plain[at],) and len(answer.snapshot) == 6 + end + 1


def test_a_stop_string_within_a_guess():
    decoder = text_engine()
    text = "abcabcabcabc"
    plain = decoder.submit(text, greedy(40)).result()
    stop = next(c for c in plain.text[5:] if c.isascii())
    answers = [decoder.submit(text, greedy(40, stop=(stop,), speculate=n)).result() for n in (0, 5)]
    assert answers[0].text == answers[1].text == plain.text[: plain.text.index(stop)] and answers[0].tokens == answers[1].tokens


def test_some_rows_guess_and_others_do_not():
    """A row that is ahead is put back after the step of the others."""
    prompts = [[1, 2, 3] * 6, prompt(5), [4, 5] * 9, prompt(11)]
    answers = engine(rows=4).generate(prompts, [greedy(12, speculate=n) for n in (4, 0, 2, 0)])
    for p, answer in zip(prompts, answers, strict=True):
        assert_greedy(model(), p, answer, 12)
    assert answers[0].drafted and answers[2].drafted and not answers[1].drafted
