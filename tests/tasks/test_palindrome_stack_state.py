"""Palindrome, Stack and StateTracking, each checked by an independent reader of the tokens."""

import itertools
from dataclasses import replace

import pytest
import torch

from fastweights.tasks import Palindrome, Stack, StateTracking, generator
from fastweights.tasks.base import IGNORE
from fastweights.tasks.state_tracking import permutations, products, running_products


@pytest.mark.parametrize("length", [3, 8, 9, 64])
def test_palindrome(length):
    task = Palindrome(length=length, symbols=5)
    batch, n = task.batch(10, generator(0)), (length - 1) // 2
    assert batch.input_ids.shape == (10, 2 * n + 1)
    assert (batch.input_ids[:, n] == 5).all() and (batch.input_ids != 5).sum() == 20 * n
    assert torch.equal(batch.input_ids[:, n + 1 :], batch.input_ids[:, :n].flip(1))
    assert torch.equal(batch.labels[:, n + 1 :], batch.input_ids[:, n + 1 :]) and (batch.labels[:, : n + 1] == IGNORE).all()
    assert task.chance == 0.2 and task.vocab_size == 6


def test_palindrome_gap_is_the_distance_to_the_first_occurrence():
    gap = Palindrome(length=15).batch(1, generator(0)).groups["gap"][0].tolist()
    assert gap == [0] * 8 + [2, 4, 8, 8, 16, 16, 16]  # distances 2, 4, 6, 8, 10, 12, 14


def test_palindrome_refuses():
    with pytest.raises(ValueError, match="length is 2"):
        Palindrome(length=2)
    with pytest.raises(ValueError, match="symbols is 1"):
        Palindrome(symbols=1)


@pytest.mark.parametrize("stacks, push", [(1, 0.6), (3, 0.6), (64, 0.6), (3, 0.1)])
def test_stack_against_python_lists(stacks, push):
    task = Stack(length=155, stacks=stacks, values=4, push_probability=push, max_depth=3)
    batch = task.batch(20, generator(0))
    PUSH, POP, UNKNOWN, END = range(4 + stacks, 8 + stacks)
    assert batch.input_ids.shape == (20, 154) and (batch.input_ids[:, -1] == END).all()
    for row in range(20):
        tokens, labels = batch.input_ids[row].tolist(), batch.labels[row].tolist()
        piles = {4 + i: [] for i in range(stacks)}  # of [value, has something lain on it]
        for t in range(0, 153, 3):
            operation, pile, third = tokens[t], piles[tokens[t + 1]], tokens[t + 2]
            assert labels[t] == IGNORE or t > 0
            if operation == PUSH:
                assert third < 4 and labels[t + 3] == IGNORE
                if pile:
                    pile[-1][1] = True
                pile.append([third, False])
            else:
                assert operation == POP and third == UNKNOWN and pile
                depth, (value, covered) = len(pile), pile.pop()
                assert labels[t + 3] == value
                assert batch.groups["depth"][row, t + 3] == min(depth, 3) and batch.groups["covered"][row, t + 3] == covered
            assert labels[t + 1] == labels[t + 2] == IGNORE
    assert task.chance == 0.25 and task.ceiling == 1 and task.vocab_size == 8 + stacks


def test_stack_pushes_as_often_as_it_says_and_chooses_evenly():
    task = Stack(length=1024, stacks=5, values=3)
    tokens = task.batch(64, generator(0)).input_ids[:, :-1].reshape(64, 341, 3)
    pushes = tokens[..., 0] == 8
    assert abs(pushes[:, 100:].double().mean() - 0.6) < 4 * (0.24 / (64 * 241)) ** 0.5  # by then no pile of the five is all empty
    for chosen in (tokens[..., 1][pushes], tokens[..., 2][pushes] + 3):
        counts = torch.bincount(chosen - 3).double()
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 18.5  # χ²₄, p = 0.001


def test_most_pops_of_the_papers_setting_are_shallow():
    batch = Stack().batch(32, generator(0))
    asked = batch.labels != IGNORE
    assert (batch.groups["depth"][asked] == 1).double().mean() > 0.6 and batch.groups["covered"][asked].double().mean() < 0.2


def test_stack_score_by_depth():
    batch = Stack(length=256, stacks=2).batch(8, generator(0))
    latest = batch.labels.roll(-1, 1).where(batch.groups["covered"].roll(-1, 1) == 0, -1)  # a reader of the latest push only
    score = Stack(length=256, stacks=2).score(latest, batch)
    assert score.groups["covered"][0].accuracy == 1 and score.groups["covered"][1].accuracy == 0
    assert set(score.groups["depth"]) <= set(range(1, 9)) and sum(c.asked for c in score.groups["depth"].values()) == score.total.asked


@pytest.mark.parametrize(
    "parameters",
    [dict(length=6), dict(stacks=0), dict(values=1), dict(push_probability=1.0), dict(push_probability=0.0), dict(max_depth=0)],
)
def test_stack_refuses(parameters):
    with pytest.raises(ValueError, match=f"{next(iter(parameters))} is"):
        Stack(**parameters)


@pytest.mark.parametrize("group, points", [("parity", 2), ("s3", 3), ("s5", 5)])
def test_states_are_the_running_composition(group, points):
    task = StateTracking(length=40, group=group)
    batch = task.batch(5, generator(0))
    elements = list(itertools.permutations(range(points)))
    assert (batch.input_ids[:, -1] == len(elements)).all() and task.vocab_size == len(elements) + 1
    for row in range(5):
        state = tuple(range(points))
        for t in range(39):
            move = elements[int(batch.input_ids[row, t])]
            state = tuple(move[i] for i in state)  # first what came before, then this move
            assert elements[int(batch.labels[row, t + 1])] == state
    assert (batch.labels[:, 0] == IGNORE).all() and task.chance == pytest.approx(1 / len(elements))


def test_parity_is_parity():
    batch = StateTracking(length=30).batch(6, generator(0))
    assert torch.equal(batch.labels[:, 1:], batch.input_ids[:, :-1].cumsum(1) % 2)


def test_s3_by_hand():
    # 0 = 012, 1 = 021, 2 = 102, 3 = 120, 4 = 201, 5 = 210. First swap points 1 and 2 (token 1), then points 0 and 1 (token 2).
    assert permutations("s3").tolist() == [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    assert products("s3")[2, 1] == 3  # 0 -> 0 -> 1, 1 -> 2 -> 2, 2 -> 1 -> 0: the permutation 1 2 0
    assert products("s3")[1, 2] == 4
    assert running_products("s3", torch.tensor([[1, 2, 1, 1]]).numpy()).tolist() == [[1, 3, 5, 3]]


def test_swaps_only():
    task = StateTracking(length=33, group="s5", moves="swaps")
    batch = task.batch(16, generator(0))
    moved = permutations("s5")[batch.input_ids[:, :-1].numpy()]
    assert ((moved != range(5)).sum(-1) == 2).all() and len(batch.input_ids[:, :-1].unique()) == 10


def test_chance_with_swaps_by_hand():
    # S3: after one swap 3 states, each 1/3; after two the identity and two rotations, each 1/3: the sign is known.
    assert StateTracking(length=5, group="s3", moves="swaps").chance == pytest.approx(1 / 3)
    # S5: one of ten swaps; then the identity with probability 1/10.
    assert StateTracking(length=3, group="s5", moves="swaps").chance == pytest.approx(1 / 10)
    assert StateTracking(length=2000, group="s5", moves="swaps").chance == pytest.approx(1 / 60, rel=0.02)


def test_position_strata():
    assert StateTracking(length=7).batch(1, generator(0)).groups["position"][0].tolist() == [0, 1, 2, 4, 4, 8, 8]


def test_state_tracking_refuses():
    for parameters, message in [
        (dict(length=1), "length is 1"),
        (dict(group="s4"), "one of parity, s3, s5"),
        (dict(moves="some"), "one of all, swaps"),
        (dict(moves="swaps"), "single swap"),
    ]:
        with pytest.raises(ValueError, match=message):
            replace(StateTracking(), **parameters)
