"""Accuracy rows: readers whose score is known, intervals by hand, and a score that no batch size changes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fastweights.evaluate.accuracy import DRAWN_AT_ONCE, accuracy, batches, interval
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.tasks import MQAR, SNIAH, Count, Palindrome, Stack, generator
from fastweights.tasks.text import ByteTokenizer

TASK = MQAR(length=32, pairs=4, vocab_size=32)


def recall(input_ids: torch.Tensor, pairs: int = 4) -> torch.Tensor:
    """A reader with perfect memory of the first ``pairs`` pairs: after each token it says that key's value."""
    keys, values = input_ids[:, 0 : 2 * pairs : 2], input_ids[:, 1 : 2 * pairs : 2]
    found = input_ids[:, :, None] == keys[:, None, :]
    return (found * values[:, None, :]).sum(-1)


class Scrambler(nn.Module):
    """Logits that depend on the row alone; remembers the sizes it was called with."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
        self.calls = []

    def forward(self, input_ids):
        assert not self.training and not torch.is_grad_enabled()
        self.calls.append(tuple(input_ids.shape))
        return self.table[input_ids]


def whole(rows):
    return [row for row in rows if row["stratum"] is None]


def test_a_perfect_reader_and_its_row():
    row, *strata = accuracy(recall, [TASK], samples=50)
    assert row["accuracy"] == 1.0 and row["asked"] == 200 and row["samples"] == 50
    assert {name: row[name] for name in ("task", "length", "pairs", "vocab_size", "power")} == {"task": "mqar", **TASK.parameters()}
    assert row["chance"] == 1 / 16 and row["ceiling"] == 1.0 and row["stratum"] is None and row["value"] is None
    assert row["high"] == 1.0 and row["low"] == pytest.approx(1 / (1 + 1.959964**2 / 200))
    assert {stratum["stratum"] for stratum in strata} == {"gap"} and sum(stratum["asked"] for stratum in strata) == 200


def test_a_reader_of_half_the_pairs_scores_a_half():
    rows = whole(accuracy(lambda ids: recall(ids, 2), [TASK, replace(TASK, length=64)], samples=40))
    assert [(row["length"], row["accuracy"]) for row in rows] == [(32, 0.5), (64, 0.5)]


def test_the_score_and_the_data_do_not_depend_on_the_batch_size():
    model = Scrambler()
    model.train()
    rows = [list(accuracy(model, [TASK], samples=70, batch_tokens=tokens)) for tokens in (1, 8 * 32, 10_000)]
    assert rows[0] == rows[1] == rows[2]
    assert {shape[0] for shape in model.calls} == {1, 8, DRAWN_AT_ONCE, 6}
    assert model.training


def test_needles_do_not_depend_on_the_batch_size_either():
    task = SNIAH(length=600, new_tokens=16)
    one = [prompt for batch in batches(task, 5, seed=3, batch_tokens=1) for prompt in batch.prompts]
    many = [prompt for batch in batches(task, 5, seed=3, batch_tokens=10_000) for prompt in batch.prompts]
    assert one == many and len(one) == 5


def test_progress_and_freshness():
    told = []
    list(accuracy(recall, [TASK], samples=70, on_samples=told.append))
    assert sum(told) == 70
    first, second = batches(TASK, 64, seed=0, batch_tokens=10_000)
    assert not torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.input_ids, TASK.batch(32, generator(0)).input_ids)


def test_strata_of_the_stack_by_a_reader_of_the_latest_push():
    def latest(input_ids):
        said = torch.zeros_like(input_ids)
        PUSH = 26 + 64
        for row, tokens in enumerate(input_ids.tolist()):
            last = {}
            for t in range(0, len(tokens) - 1, 3):
                if tokens[t] == PUSH:
                    last[tokens[t + 1]] = tokens[t + 2]
                said[row, t + 2] = last[tokens[t + 1]]
        return said

    rows = list(accuracy(latest, [Stack(length=256)], samples=20))
    covered = {row["value"]: row["accuracy"] for row in rows if row["stratum"] == "covered"}
    assert covered[0] == 1.0 and covered[1] < 0.3
    assert [row["value"] for row in rows if row["stratum"] == "depth"][:2] == [1, 2]


def test_needles_are_scored_on_continuations():
    task = SNIAH(length=700, new_tokens=16)

    def quoter(prompts):
        return [prompt.split(" is: ")[1].split(".")[0] if len(prompt) % 2 else "I do not know" for prompt in prompts]

    row, *strata = accuracy(quoter, [task], samples=33)
    odd = sum(len(prompt) % 2 for batch in batches(task, 33, seed=2**31, batch_tokens=10**6) for prompt in batch.prompts)
    assert row["accuracy"] == odd / 33 and row["asked"] == 33
    assert row["shortest_prompt"] <= row["prompt_tokens"] <= row["longest_prompt"] <= 700 - 16
    assert {stratum["stratum"] for stratum in strata} == {"depth"}


class Parrot(nn.Module):
    """Has ``generate``: says what follows "is: " in the unpadded prompt, and checks the padding."""

    def forward(self, input_ids):
        raise AssertionError("needles are generated")

    def generate(self, input_ids, *, attention_mask, max_new_tokens, do_sample, pad_token_id):
        assert not do_sample and max_new_tokens == 16 and pad_token_id == 0
        out = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            assert mask.sort().values.equal(mask) and mask[-1] == 1  # padding on the left
            text = bytes(ids[mask == 1].tolist()).decode()
            assert text.startswith("A special magic number")
            out.append(list(text.split(" is: ")[1][:16].encode()))
        return torch.cat([input_ids, torch.tensor(out)], dim=1)


def test_generation_is_padded_on_the_left_and_read_from_the_prompts_end():
    assert whole(accuracy(Parrot(), [SNIAH(length=700, new_tokens=16)], samples=9))[0]["accuracy"] == 1.0


def test_a_tokenizer_that_cannot_decode_is_refused():
    task = SNIAH(length=700, new_tokens=16, tokenizer=lambda text: list(text.encode()))
    with pytest.raises(ValueError, match="has no decode"):
        list(accuracy(Parrot(), [task], samples=1))


def test_samples_must_be_positive():
    with pytest.raises(ValueError, match="samples is 0"):
        list(accuracy(recall, [TASK], samples=0))


def test_wilson_by_hand():
    # 8 of 10 independent questions, one a sequence: the textbook interval (0.4902, 0.9433).
    count = Count.of(torch.tensor([1] * 8 + [0] * 2), torch.ones(10))
    assert interval(count) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(Count()) == (0.0, 1.0)
    low, high = interval(Count.of(torch.zeros(5), torch.ones(5)))
    assert low == pytest.approx(0, abs=1e-12) and high == pytest.approx(0.4345, abs=1e-4)
    assert interval(count, confidence=0.5)[0] > interval(count)[0]


def test_questions_that_stand_and_fall_together_count_once():
    # 10 sequences of 100 questions, each all right or all wrong: as little is known as from 10 questions.
    together = Count.of(torch.tensor([100] * 8 + [0] * 2), torch.full((10,), 100))
    apart = Count.of(torch.full((10,), 80), torch.full((10,), 100))
    assert interval(together) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert interval(apart) == pytest.approx(interval(Count(1000, 1000, 800, 800, 800, 1000)), abs=1e-12)


def test_the_interval_covers_the_truth():
    # Correlated questions: every sequence has its own rate. 95 % intervals must hold the mean rate about as often as they say.
    rng = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        rate = torch.rand(60, generator=rng).clamp(0.2, 0.9)
        right = torch.bernoulli(rate[:, None].expand(60, 16), generator=rng).sum(1)
        low, high = interval(Count.of(right, torch.full((60,), 16)))
        truth = (0.2 * 0.2 + 0.1 * 0.9) + (0.9**2 - 0.2**2) / 2  # mean of a clamped uniform
        held += low <= truth <= high
    assert 0.90 < held / 400 < 0.99


def test_even_lengths_of_the_palindrome_are_one_token_shorter():
    rows = list(accuracy(lambda ids: ids, [Palindrome(length=16)], samples=3))
    assert rows[0]["asked"] == 3 * 7 and rows[0]["length"] == 16


class Overheard(ByteTokenizer):
    """Bytes, and a record of what was decoded."""

    def __init__(self):
        self.told = []

    def decode(self, ids):
        self.told.append(super().decode(ids))
        return self.told[-1]


def test_a_models_continuations_do_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    size = dict(hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=32, tie_word_embeddings=False)
    model, told = FastWeightsForCausalLM(FastWeightsConfig(mixer="kla+ccq", vocab_size=256, **size)), []
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.5)  # wild enough that what is said depends on what was read
    for batch_tokens in (1, 8 * 600):
        task = SNIAH(length=600, new_tokens=5, tokenizer=Overheard())
        rows = list(accuracy(model, [task], samples=8, batch_tokens=batch_tokens))
        told.append(task.tokenizer.told)
        assert rows[0]["asked"] == 8
    assert told[0] == told[1] and len(set(told[0])) > 1
