"""MQAR: Zoology's definition, the KLA paper's variant, its confounds and its ceiling."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastweights.tasks import MQAR, MQARKLA, generator
from fastweights.tasks.base import IGNORE


def queries(batch):
    """(row, place of the query, label) of every question."""
    for row, place in (batch.labels != IGNORE).nonzero().tolist():
        yield row, place - 1, int(batch.labels[row, place])


@pytest.mark.parametrize("length, pairs", [(64, 4), (64, 16), (512, 128)])
def test_the_standard_definition(length, pairs):
    task = MQAR(length=length, pairs=pairs, vocab_size=300)
    batch = task.batch(8, generator(0))
    tokens = batch.input_ids
    for row in range(8):
        keys, values = tokens[row, 0 : 2 * pairs : 2].tolist(), tokens[row, 1 : 2 * pairs : 2].tolist()
        assert len(set(keys)) == len(set(values)) == pairs  # without replacement
        assert min(keys) >= 1 and max(keys) < 150 and min(values) >= 150 and max(values) < 300
        asked = [(place, label) for r, place, label in queries(batch) if r == row]
        assert len(asked) == pairs and all(place >= 2 * pairs and place % 2 == 0 for place, _ in asked)
        assert {int(tokens[row, place]): label for place, label in asked} == dict(zip(keys, values, strict=True))
    assert task.chance == 1 / 150 and task.ceiling == 1


def test_filler_is_any_token_and_the_answer_is_not_shown():
    batch = MQAR(length=64, pairs=2, vocab_size=16).batch(400, generator(0))
    filler = torch.ones_like(batch.input_ids, dtype=torch.bool)
    filler[:, :4] = False
    filler &= batch.labels.roll(-1, 1) == IGNORE
    counts = torch.bincount(batch.input_ids[filler], minlength=16).double()
    expected = counts.sum() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # χ²₁₅, p = 0.001
    shown = sum(int(batch.input_ids[row, place + 1]) == label for row, place, label in queries(batch))
    assert shown < 0.12 * 800  # 1 in 16 by accident


def test_slots_follow_the_power_law_with_the_first_pair_first():
    task = MQAR(length=8, pairs=2, vocab_size=64)  # two slots: the first pair gets slot 1 with probability 1 / (1 + 2^-0.99)
    batch = task.batch(20_000, generator(0))
    first_is_first = (batch.input_ids[:, 4] == batch.input_ids[:, 0]).double().mean()
    p = 1 / (1 + 2**-0.99)
    assert abs(first_is_first - p) < 4 * (p * (1 - p) / 20_000) ** 0.5
    uniform = (replace(task, power=1.0).batch(20_000, generator(0)).input_ids[:, 4] == 0).double()
    assert uniform.mean() == 0  # key 0 is never asked


def test_gap_counts_from_the_value_to_the_query():
    # Both queries of a length-8, 2-pair sequence: places 4 and 6; values at 1 and 3. Distances 3 or 5 (first pair), 1 or 3 (second).
    batch = MQAR(length=8, pairs=2, vocab_size=64).batch(50, generator(0))
    for row, place, label in queries(batch):
        distance = place - batch.input_ids[row, :4].tolist().index(label)
        assert batch.groups["gap"][row, place + 1] == {1: 1, 3: 4, 5: 8}[distance]


@pytest.mark.parametrize(
    "parameters, message",
    [
        (dict(length=14, pairs=4), "4·pairs ≤ length"),
        (dict(length=63), "even length"),
        (dict(pairs=0), "at least 1"),
        (dict(pairs=8, vocab_size=16), "without replacement"),
        (dict(power=0.0), "power is 0.0"),
    ],
)
def test_impossible_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**parameters)


def test_the_kla_variant():
    task = MQARKLA(length=64, pairs=6, vocab_size=32)
    batch = task.batch(200, generator(0))
    tokens, asked = batch.input_ids, {}
    assert (tokens[:, 0:12:2] < 16).all() and (tokens[:, 1:12:2] >= 16).all()
    for row, place, label in queries(batch):
        assert 12 <= place <= 62
        asked.setdefault(row, []).append((int(tokens[row, place]), label))
        seen = int(tokens[row, place]) in [
            int(t) for i, t in enumerate(tokens[row, 12:place], 12) if batch.labels[row, i + 1] == IGNORE
        ]  # in filler, not at another query
        assert batch.groups["seen"][row, place + 1] == seen
        assert batch.groups["repeated"][row, place + 1] == (tokens[row, 0:12:2].tolist().count(int(tokens[row, place])) > 1)
    for row in range(200):  # every pair is asked once, repeated keys as often as they occur
        pairs = list(zip(tokens[row, 0:12:2].tolist(), tokens[row, 1:12:2].tolist(), strict=True))
        assert sorted(asked[row]) == sorted(pairs)


@pytest.mark.parametrize("pairs, vocab_size, length", [(32, 8192, 256), (6, 256, 64), (1, 8192, 1024)])
def test_the_kla_ceiling_is_what_the_best_reader_gets(pairs, vocab_size, length):
    task = MQARKLA(pairs=pairs, vocab_size=vocab_size, length=length)
    batch = task.batch(1000, generator(0))
    right = 0
    for row, place, label in queries(batch):
        table = dict(zip(batch.input_ids[row, 0 : 2 * pairs : 2].tolist(), batch.input_ids[row, 1 : 2 * pairs : 2].tolist(), strict=True))
        right += table[int(batch.input_ids[row, place])] == label
    asked = 1000 * pairs
    assert abs(right / asked - task.ceiling) <= 4 * (task.ceiling * (1 - task.ceiling) / asked) ** 0.5


def test_the_kla_ceiling_by_hand():
    assert MQARKLA(pairs=2, vocab_size=4, length=16).ceiling == 0.75  # two keys: alike half of the time, and then half is lost
    assert MQARKLA().ceiling == pytest.approx(0.99623, abs=5e-6)
    assert MQARKLA(pairs=1, length=1024).ceiling == 1


def test_about_a_tenth_of_long_queries_have_met_their_key_in_filler():
    batch = MQARKLA(length=2048).batch(64, generator(0))
    share = batch.groups["seen"].sum().item() / (batch.labels != IGNORE).sum().item()
    expected = np.mean([1 - (1 - 1 / 8192) ** k for k in range(1952)])  # filler tokens before a query are uniform up to 1,951
    assert abs(share - expected) < 0.03 and 0.09 < expected < 0.13


def test_the_kla_variant_refuses():
    with pytest.raises(ValueError, match="3·pairs"):
        MQARKLA(length=96, pairs=32)
    with pytest.raises(ValueError, match="vocab_size is 1"):
        MQARKLA(vocab_size=1)
    with pytest.raises(ValueError, match="pairs is 0"):
        MQARKLA(pairs=0)
