"""Every task alike: same seed, same data; labels are Hugging Face's; a perfect reader scores 1; the score counts as by hand."""

import hashlib

import numpy as np
import pytest
import torch

from fastweights.tasks import SNIAH, TASKS, Batch, Count, Score, generator
from fastweights.tasks.base import IGNORE, score_tokens

SMALL = {
    "mqar": dict(length=32, pairs=3, vocab_size=64),
    "mqar_kla": dict(length=48, pairs=5, vocab_size=32),
    "s_niah": dict(variant=3, length=900, new_tokens=40, haystack="One day it rained. Then came the sun! Who knew? Nobody, it seems, did."),
    "palindrome": dict(length=33, symbols=9),
    "stack": dict(length=64, stacks=4, values=5),
    "state_tracking": dict(length=24, group="s5"),
}
GOLDEN = {
    "mqar": "8164cbf8bf597cb5de3156f22c70f5ef",
    "mqar_kla": "25fb7e2177e609bd704ed20ed8529084",
    "s_niah": "0818e838c59482aa6be0551543e7a421",
    "palindrome": "052ccead028321e831d108425be2663f",
    "stack": "33642e957e125475478a2e24bac10295",
    "state_tracking": "bb3352b86139b3eac93d72c3a63aa49f",
}
"""Hashes of the first two batches from seed 7. A new hash is a new data set: numbers measured before it no longer compare."""


@pytest.fixture(params=sorted(TASKS))
def task(request):
    return TASKS[request.param](**SMALL[request.param])


def digest(batch: Batch) -> str:
    sha = hashlib.sha256()
    for tensor in (batch.input_ids, batch.labels, *(batch.groups[name] for name in sorted(batch.groups))):
        sha.update(np.ascontiguousarray(tensor.numpy().astype("<i8")).tobytes())
    return sha.hexdigest()[:16]


def told(batch: Batch) -> torch.Tensor:
    """The predictions of a reader that is always right."""
    return batch.labels.roll(-1, dims=1)


def test_same_seed_same_data_everywhere(task):
    rng = generator(7)
    assert digest(task.batch(4, rng)) + digest(task.batch(4, rng)) == GOLDEN[task.name]


def test_batches_are_fresh_and_seeds_differ(task):
    rng = generator(0)
    first, second, other = task.batch(4, rng), task.batch(4, rng), task.batch(4, generator(1))
    assert len({digest(batch) for batch in (first, second, other)}) == 3


def test_shapes_types_and_ranges(task):
    batch = task.batch(6, generator(0))
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.shape == batch.labels.shape and len(batch.input_ids) == 6 and batch.input_ids.shape[1] <= task.length
    assert batch.input_ids.min() >= 0 and batch.input_ids.max() < task.vocab_size
    asked = batch.labels != IGNORE
    assert asked.any(1).all() and not asked[:, 0].any()  # position 0 has no logits before it: Hugging Face drops its label
    assert batch.labels[asked].min() >= 0 and batch.labels[asked].max() < task.vocab_size
    assert all(group.shape == batch.labels.shape and group.dtype == torch.int64 for group in batch.groups.values())


def test_the_right_answers_score_one_and_wrong_ones_nothing(task):
    batch = task.batch(6, generator(0))
    asked = int((batch.labels != IGNORE).sum())
    perfect, wrong = task.score(told(batch), batch), task.score(told(batch) + 1, batch)
    assert (perfect.total.asked, perfect.total.correct, perfect.total.samples) == (asked, asked, 6) and perfect.accuracy == 1
    assert wrong.total.correct == 0 and wrong.total.asked == asked
    for counts in perfect.groups.values():
        assert sum(count.asked for count in counts.values()) == asked


def test_logits_score_as_their_argmax(task):
    batch = task.batch(3, generator(0))
    logits = torch.randn(*batch.labels.shape, task.vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, ::2] += 9 * torch.nn.functional.one_hot(told(batch)[:, ::2].clamp(min=0), task.vocab_size)
    assert task.score(logits, batch) == task.score(logits.argmax(-1), batch)


def test_chance_ceiling_and_parameters_are_told(task):
    assert 0 < task.chance < task.ceiling <= 1
    assert f"{task.name}(length={task.length}" in str(task) or isinstance(task, SNIAH)
    assert "chance" in str(task) and "ceiling" in str(task)
    assert "haystack" not in task.parameters() and task.parameters()["length"] == task.length


def test_tasks_are_immutable_and_keyword_only(task):
    with pytest.raises(AttributeError):
        task.length = 5
    with pytest.raises(TypeError):
        type(task)(64)


def test_moving_a_batch_keeps_all_of_it(task):
    batch = task.batch(2, generator(0))
    moved = batch.to("meta")
    assert type(moved) is type(batch)
    assert {t.device.type for t in (moved.input_ids, moved.labels, *moved.groups.values())} == {"meta"}


def by_hand() -> Batch:
    labels = torch.tensor([[IGNORE, 5, IGNORE, 6], [IGNORE, IGNORE, IGNORE, 7]])
    return Batch(input_ids=torch.zeros(2, 4, dtype=torch.int64), labels=labels, groups={"gap": torch.tensor([[0, 1, 0, 2], [0, 0, 0, 2]])})


def test_a_score_by_hand():
    # What position t says answers the label at t + 1: position 0 says 5 (right), position 2 says 6 (right) and 8 (wrong).
    score = score_tokens(torch.tensor([[5, 0, 6, 6], [7, 7, 8, 7]]), by_hand())
    assert score.total == Count(samples=2, asked=3, correct=2, correct_squared=4, correct_asked=4, asked_squared=5)
    assert score.groups == {"gap": {1: Count(1, 1, 1, 1, 1, 1), 2: Count(2, 2, 1, 1, 1, 2)}}
    assert score.accuracy == pytest.approx(2 / 3)


def test_scores_add_up():
    one = score_tokens(torch.tensor([[5, 0, 6, 6], [7, 7, 8, 7]]), by_hand())
    total = sum([one, one], Score())
    assert total.total == Count(4, 6, 4, 8, 8, 10) and total.groups["gap"][2] == Count(4, 4, 2, 2, 2, 4)
    assert Score().accuracy != Score().accuracy  # nan: nothing was asked


def test_answers_of_the_wrong_shape_are_refused():
    with pytest.raises(ValueError, match=r"answers are \[2, 3\]; logits must be \[2, 4, vocabulary\]"):
        score_tokens(torch.zeros(2, 3, dtype=torch.int64), by_hand())
