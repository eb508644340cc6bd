"""The needle: prompts after RULER, any tokenizer, real lengths, depth, and a score that looks for the value in the continuation."""

import re
import uuid
from dataclasses import replace

import numpy as np
import pytest

from fastweights.tasks import SNIAH, generator
from fastweights.tasks.s_niah import DEPTHS, REPEATED, _how_many_fit
from fastweights.tasks.text import LONGEST_SENTENCE, ByteTokenizer, encode, split_sentences

TALE = " ".join(f"This is sentence number {i}. It follows number {i - 1}!" for i in range(1, 400))


def test_the_prompt_word_for_word():
    task = SNIAH(length=640, new_tokens=16, depth=50)
    batch = task.batch(1, generator(0))
    key = re.search(r"for (\S+) is:", batch.prompts[0]).group(1)
    half = (batch.prompts[0].count(REPEATED)) // 2
    rest = batch.prompts[0].count(REPEATED) - half
    assert half == 1 and rest in (1, 2)
    assert batch.prompts[0] == "\n".join(
        [
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the number afterwards.",
            *[REPEATED] * half,
            f"One of the special magic numbers for {key} is: {batch.values[0]}.",
            *[REPEATED] * rest,
            f"What is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is",
        ]
    )
    assert re.fullmatch(r"[1-9]\d{6}", batch.values[0]) and re.fullmatch(r"[a-z]+-[a-z]+", key)


@pytest.mark.parametrize("variant", [1, 2, 3])
def test_prompts_fill_their_length_to_the_sentence_and_say_how_long_they_are(variant):
    task = SNIAH(variant=variant, length=1500, new_tokens=50, haystack=TALE)
    batch = task.batch(20, generator(1))
    assert (batch.prompt_tokens == [len(prompt.encode()) for prompt in batch.prompts]).all()
    longest = len(REPEATED) + 1 if variant == 1 else max(map(len, split_sentences(TALE))) + 1
    assert (batch.prompt_tokens <= 1450).all() and (batch.prompt_tokens > 1450 - longest).all()
    for prompt, value, ids in zip(batch.prompts, batch.values, batch.prompt_ids, strict=True):
        assert prompt.count(value) == 1 and ByteTokenizer().decode(ids) == prompt
        if variant == 3:
            assert uuid.UUID(value).version == 4 and str(uuid.UUID(value)) == value
        else:
            assert re.fullmatch(r"[1-9]\d{6}", value)


def test_depth_is_the_share_of_sentences_before_the_needle():
    assert len(DEPTHS) == 40 and DEPTHS[:4] == (0, 3, 5, 8) and DEPTHS[-1] == 100
    for depth in (0, 25, 50, 100):
        task = SNIAH(variant=2, length=3000, haystack=TALE, depth=depth)
        batch = task.batch(2, generator(0))
        for prompt in batch.prompts:
            context = prompt.split("\n")[1]
            before, after = re.split(r"One of the special magic numbers for \S+ is: \d+\.", context)
            n, m = len(split_sentences(before)), len(split_sentences(after))
            assert n == int((n + m) * depth / 100)
        assert (batch.depth == depth).all()


def test_without_a_depth_the_grid_is_drawn_evenly():
    batch = SNIAH(length=600).batch(400, generator(0))
    assert set(batch.depth.tolist()) == set(DEPTHS)
    assert len(set(batch.values)) > 395


def test_the_haystack_starts_where_it_is_told_and_wraps_around():
    task = SNIAH(variant=2, length=2000, haystack=TALE, depth=100)
    assert all(prompt.split("\n")[1].startswith("This is sentence number 1.") for prompt in task.batch(5, generator(0)).prompts)
    starts = {prompt.split("\n")[1][:26] for prompt in replace(task, random_start=True).batch(20, generator(0)).prompts}
    assert len(starts) > 15
    short = SNIAH(variant=2, length=2000, haystack="Only two here. That is all.", depth=0).batch(1, generator(0)).prompts[0]
    assert short.count("Only two here. That is all. Only two here.") > 10


@pytest.mark.parametrize("sizes, room, fits", [([3, 4, 5], 12, 3), ([3, 4, 5], 11, 2), ([3, 4, 5], 27, 7), ([3, 4, 5], -1, 0), ([3], 9, 3)])
def test_how_many_fit_by_hand(sizes, room, fits):
    assert _how_many_fit(np.array(sizes), room) == fits


class Words:
    """A tokenizer of another kind: words, with a begin and an end token, and merges that ``encode(a + b)`` need not respect."""

    vocab_size = 5000

    def __init__(self):
        self.ids = {}

    def __call__(self, text):
        return [1, *(self.ids.setdefault(word, 3 + len(self.ids)) for word in text.split()), 2]


def test_any_callable_is_a_tokenizer():
    task = SNIAH(variant=2, length=400, new_tokens=20, haystack=TALE, tokenizer=Words())
    batch = task.batch(6, generator(0))
    assert (batch.prompt_tokens <= 380).all() and (batch.prompt_tokens > 370).all()
    assert (batch.prompt_tokens == [2 + len(prompt.split()) for prompt in batch.prompts]).all()
    answers = [[int(t) for t in row[row != -100]] for row in batch.labels]
    assert answers == [[task.tokenizer.ids[value], 2] for value in batch.values]  # from where prompt and prompt + answer differ


def test_the_answer_is_asked_in_tokens_for_training():
    batch = SNIAH(length=640, new_tokens=16).batch(5, generator(0))
    for row in range(5):
        n = int(batch.prompt_tokens[row])
        assert bytes(batch.input_ids[row, :n].tolist()).decode() == batch.prompts[row]
        asked = batch.labels[row] != -100
        assert bytes(batch.labels[row][asked].tolist()).decode() == " " + batch.values[row]
        assert asked.nonzero()[0] == n


def test_score_by_hand():
    task = SNIAH(variant=3, length=900, new_tokens=40, haystack=TALE)
    batch = task.batch(4, generator(0))
    batch.depth[:] = [0, 0, 50, 100]
    texts = [f"{batch.values[0].upper()}.", batch.values[1][:-1], f"the uuid is\n{batch.values[2]} or another", ""]
    score = task.score(texts, batch)
    assert score.total.correct == 2 and score.total.asked == 4 and score.accuracy == 0.5
    assert {depth: (count.correct, count.asked) for depth, count in score.groups["depth"].items()} == {0: (1, 2), 50: (1, 1), 100: (0, 1)}
    with pytest.raises(ValueError, match="1 continuations for 4 needles"):
        task.score(["x"], batch)


def test_bad_parameters_are_refused():
    for parameters, message in [
        (dict(variant=4), "variant is 4; it must be 1, 2 or 3"),
        (dict(variant=2), "give it as haystack="),
        (dict(depth=101), "depth is 101"),
        (dict(new_tokens=0), "new_tokens is 0"),
        (dict(length=200), "length is 200; the question and 128 new tokens alone take"),
        (dict(tokenizer=lambda text: []), "gives no tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            SNIAH(**parameters)
    with pytest.raises(ValueError, match="has no vocab_size"):
        _ = SNIAH(length=400, tokenizer=lambda text: [len(word) for word in text.split()]).vocab_size


def test_chance_is_blind_luck():
    assert SNIAH().chance == 1 / 9_000_000 and SNIAH(variant=3, haystack=TALE).chance == 2**-122


def test_sentences():
    text = (
        'Mr. J. Smith paid 3.50 dollars.  "Really?" Yes!\nAs Dr. Who said, e.g. Monday is fine... I did. So did I. '
        "(Then it ended.) no capital. here"
    )
    assert split_sentences(text) == [
        "Mr. J. Smith paid 3.50 dollars.",
        '"Really?"',
        "Yes!",
        "As Dr. Who said, e.g. Monday is fine...",
        "I did.",
        "So did I.",
        "(Then it ended.) no capital. here",
    ]
    assert split_sentences("") == [] and split_sentences("One") == ["One"]


def test_code_fills_a_prompt_though_it_has_no_sentences():
    code = "def f(x):\n    return x\n\n" * 500
    pieces = split_sentences(code)
    assert max(map(len, pieces)) <= LONGEST_SENTENCE and " ".join(pieces) == " ".join(code.split())
    batch = SNIAH(variant=2, length=4000, haystack=code).batch(2, generator(0))
    assert (batch.prompt_tokens > 4000 - 128 - LONGEST_SENTENCE - 1).all()


def test_sentences_join_to_the_text():
    text = "A b. C d!  E\n\nf? G. H. I. J k." * 20
    assert " ".join(split_sentences(text)) == " ".join(text.split())


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(encode(tokenizer, "η ≤ 1")) == "η ≤ 1" and tokenizer.decode([0xCE]) == "�"
    assert ByteTokenizer() == tokenizer and hash(ByteTokenizer()) == hash(tokenizer) and repr(tokenizer) == "bytes"
