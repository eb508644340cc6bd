import hashlib
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.train.packing import IGNORE, PackedBatches


def batches(corpus, **options):
    return PackedBatches(corpus, **{"sequence_length": 16, "windows": 3, "count": 100} | options)


def test_a_row_is_what_it_says(corpus):
    for row in batches(corpus):
        ids, labels, places, borders = row["input_ids"][0], row["labels"][0], row["position_ids"][0], row["cu_seqlens"].tolist()
        assert ids.shape == labels.shape == places.shape == (48,)
        assert borders[0] == 0 and borders[-1] == 48 and {16, 32} <= set(borders) and borders == sorted(set(borders))
        starts = torch.zeros(48, dtype=torch.bool)
        starts[borders[:-1]] = True
        assert starts[ids == 256].all(), "a document begins without a border"
        assert (labels[starts] == IGNORE).all() and (labels[~starts] == ids[~starts]).all()
        assert (places[starts] == 0).all() and (places[1:][~starts[1:]] == places[:-1][~starts[1:]] + 1).all()


def test_an_epoch_feeds_every_token_once_but_for_the_rest(corpus):
    per_epoch = batches(corpus).windows_per_epoch
    everything = Counter(token for i in range(len(corpus)) for token in corpus[i].tolist())
    orders = []
    for epoch in range(2):
        rows = batches(corpus, windows=1, count=2 * per_epoch)
        fed = [rows[epoch * per_epoch + i]["input_ids"][0].tolist() for i in range(per_epoch)]
        counted = Counter(token for row in fed for token in row)
        assert counted <= everything and sum(everything.values()) - sum(counted.values()) == corpus.total % 16
        orders.append(fed)
    assert orders[0] != orders[1]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_batch_is_a_function_of_its_number(corpus_of_numbers, data):
    straight = [row["input_ids"] for row in batches(corpus_of_numbers)]
    jumped = batches(corpus_of_numbers)
    for number in data.draw(st.lists(st.integers(0, 99), max_size=20)):  # over several epochs, back and forth
        assert torch.equal(jumped[number]["input_ids"], straight[number])


@pytest.fixture(scope="module")
def corpus_of_numbers(tmp_path_factory):
    from fastweights.train.corpus import load_corpus
    from fastweights.train.tokenizer import byte_tokenizer

    folder = tmp_path_factory.mktemp("numbers")
    (folder / "numbers.jsonl").write_text("".join(f'{{"text": "{i} {i * i}"}}\n' for i in range(150)))
    return load_corpus([str(folder)], byte_tokenizer(), cache=folder / "cache")


def test_the_batches_of_a_seed_are_those_of_all_earlier_versions(corpus):
    """A run that was begun goes on, and a recorded result is made again."""
    rows = batches(corpus, seed=7)
    content = b"".join(row[name].numpy().tobytes() for row in rows for name in ("input_ids", "cu_seqlens"))
    assert hashlib.sha256(content).hexdigest().startswith("6d7454cd0866bb78")


def test_the_seed_matters_and_is_all_that_does(corpus):
    first = [batches(corpus, seed=seed)[0]["input_ids"].tolist() for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


def test_ranks_share_the_windows_of_a_step(corpus):
    """Two ranks with one window each feed what one rank feeds with two, or with two pieces of one."""
    alone = batches(corpus, windows=2)
    pieces = batches(corpus, windows=1, count=200)
    ranks = [batches(corpus, windows=1, rank=rank, ranks=2) for rank in range(2)]
    for step in range(20):
        assert torch.equal(alone[step]["input_ids"], torch.cat([rank[step]["input_ids"] for rank in ranks], dim=1))
        assert torch.equal(alone[step]["input_ids"], torch.cat([pieces[2 * step + i]["input_ids"] for i in range(2)], dim=1))


def test_describe_names_the_text_of_a_batch(corpus):
    rows = batches(corpus, windows=1)
    for batch in (0, 50):
        text = rows.describe(batch)
        assert text.startswith(f"epoch {batch // rows.windows_per_epoch}, window ")
        tokens = []
        for piece in text.split(": ", 1)[1].split(", "):
            name, bounds = piece.rstrip("]").rsplit("[", 1)
            begin, end = map(int, bounds.split(":"))
            tokens += corpus[corpus.names.index(name)][begin:end].tolist()
        assert tokens == rows[batch]["input_ids"][0].tolist()


def test_too_little_text(corpus):
    with pytest.raises(ValueError, match=f"{corpus.total} tokens of text do not fill one window of sequence_length=10000"):
        batches(corpus, sequence_length=10000)
    with pytest.raises(IndexError):
        batches(corpus)[100]
