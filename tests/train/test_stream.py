import itertools
import json
import sys
import types
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader

from fastweights.train import hub
from fastweights.train.corpus import join, keep_documents, load_corpus
from fastweights.train.hub import HUB_TEXTS, HubStream, HubText, held_out, hub_text, open_split
from fastweights.train.presets import TrainSettings
from fastweights.train.stream import CorpusStream, Stream, StreamRows, TokenStream
from fastweights.train.tokenizer import byte_tokenizer
from fastweights.train.trainer import train

TEXTS = [f"document {i}: " + "x" * (i * 7 % 40) for i in range(90)]


@pytest.fixture
def folder(tmp_path):
    """A data set of three parquet files, as the hub would have it."""
    where = tmp_path / "dataset"
    where.mkdir()
    for i in range(3):
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[30 * i : 30 * i + 30]}), where / f"train-{i}.parquet")
    return str(where)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(hub, "BLOCK", 8)


def from_hub(folder, excluded=()):
    return HubStream(HubText(repository=folder), "bytes", seed=0, excluded=frozenset(excluded))


def rows_of(stream, weights=(1.0,), **options):
    sources = stream if isinstance(stream, list) else [stream]
    return StreamRows(Stream(sources, list(weights)), **{"sequence_length": 16, "windows": 3} | options)


def tokens(rows, count):
    return [row["input_ids"][0].tolist() for row in itertools.islice(rows, count)]


def test_an_epoch_gives_every_document_once_in_an_order_of_its_own(folder, small_blocks):
    stream = from_hub(folder)
    assert isinstance(stream, TokenStream)
    both = [bytes(t[1:].tolist()).decode() for t, _ in itertools.islice(stream.documents(0, 1, None), 180)]
    assert Counter(both[:90]) == Counter(both[90:]) == Counter(TEXTS)
    assert both[:90] != both[90:] and both[:8] != TEXTS[:8]
    assert all(t[0] == 256 for t, _ in itertools.islice(stream.documents(0, 1, None), 5))


@pytest.mark.parametrize("readers", [2, 3, 4])  # as many files as readers, a divisor, neither
def test_readers_share_the_documents(folder, small_blocks, readers):
    given = []
    for reader in range(readers):
        for t, place in from_hub(folder).documents(reader, readers, None):
            if place["epoch"]:
                break
            given.append(bytes(t[1:].tolist()).decode())
    assert Counter(given) == Counter(TEXTS)


def test_held_out_documents_are_never_trained_on(folder, small_blocks, monkeypatch):
    monkeypatch.setattr(hub, "HELD_OUT", 12)
    text = HubText(repository=folder)
    kept = list(held_out(text))
    assert [document.text.decode() for document in kept] == TEXTS[:12]
    stream = from_hub(folder, excluded=[document.name.rpartition(":")[2] for document in kept])
    given = [bytes(t[1:].tolist()).decode() for t, _ in itertools.islice(stream.documents(0, 1, None), 78)]
    assert Counter(given) == Counter(TEXTS[12:])


def test_rows_go_on_from_any_place_bit_for_bit(folder, small_blocks, corpus):
    """A mixture, over the ends of blocks, epochs and rounds."""
    sources = [from_hub(folder), CorpusStream(corpus, seed=0)]
    straight = list(itertools.islice(rows_of(sources, (0.7, 0.3)), 120))
    assert json.loads(straight[-1]["place"])["sources"][0]["document"]["epoch"] >= 1
    for stop in (1, 2, 40, 77, 119):
        resumed = rows_of(sources, (0.7, 0.3), fed=stop, places={"0": straight[stop - 1]["place"]})
        rest = list(itertools.islice(resumed, 120 - stop))
        for a, b in zip(straight[stop:], rest, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in ("input_ids", "labels", "cu_seqlens"))
        middle = len(rest) // 2  # and from a place that a resumed reader gave
        twice = rows_of(sources, (0.7, 0.3), fed=stop + middle, places={"0": rest[middle - 1]["place"]} if middle else resumed.places)
        assert tokens(twice, len(rest) - middle) == [row["input_ids"][0].tolist() for row in straight[stop + middle :]]


def test_a_row_is_packed_as_always(folder):
    row = next(iter(rows_of(from_hub(folder))))
    bounds = row["cu_seqlens"].tolist()
    assert {0, 16, 32, 48} <= set(bounds) and row["input_ids"].shape == row["labels"].shape == row["position_ids"].shape == (1, 48)
    assert set((row["input_ids"][0] == 256).nonzero().flatten().tolist()) <= set(bounds)


def test_workers_read_ahead_and_resume_in_turn(folder, small_blocks):
    def loader(**options):
        rows = rows_of(from_hub(folder), workers=2, **options)
        return DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context="fork")

    straight = list(itertools.islice(loader(), 12))
    assert [row["reader"] for row in straight] == ["0", "1"] * 6
    places = {row["reader"]: row["place"] for row in straight[:5]}
    resumed = list(itertools.islice(loader(fed=5, places=places), 7))
    assert [row["input_ids"].tolist() for row in resumed] == [row["input_ids"].tolist() for row in straight[5:]]


def test_ranks_read_apart(folder):
    ranks = [rows_of(from_hub(folder), rank=rank, ranks=2) for rank in range(2)]
    first, second = (tokens(rows, 4) for rows in ranks)
    assert first != second


@pytest.mark.full
def test_weights_are_shares_of_the_windows(tmp_path):
    corpora = []
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(letter * 5000)
        corpora.append(load_corpus([str(tmp_path / f"{letter}.txt")], byte_tokenizer(), cache=tmp_path / "cache"))
    rows = rows_of([CorpusStream(corpus, seed=0) for corpus in corpora], (3.0, 1.0), windows=1)
    fed = tokens(rows, 2000)
    of_a = [ord("a") in row for row in fed]
    assert sum(of_a[:1000]) == sum(of_a[1000:]) == 750
    assert of_a[:1000] != of_a[1000:] and 20 < sum(of_a[:40]) < 40


@pytest.mark.full
def test_a_stopped_training_goes_on_without_a_trace(folder, small_blocks, corpus, llama, tmp_path):
    """Twice, in the middle of documents and blocks, and over the end of an epoch: losses and weights bit for bit."""
    settings = TrainSettings(steps=40, batch_tokens=96, sequence_length=16, accumulation=2, save_every=100, log_every=1, learning_rate=1e-2)

    def run(where, stop_at=None):
        model, done = llama(), []
        stream = Stream([from_hub(folder), CorpusStream(corpus, seed=0)], [0.8, 0.2])
        training = train(
            model,
            stream,
            settings,
            folder=tmp_path / where,
            on_step=lambda step, logs: done.append(step),
            should_stop=lambda: done[-1] == stop_at,
        )
        return [(row["step"], row["loss"]) for row in training.history], model

    straight, model = run("straight")
    for stop_at in (7, 33, None):
        resumed, twin = run("stopped", stop_at)
    assert resumed == straight and len(straight) == 40
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    place = json.loads((tmp_path / "stopped/checkpoint-40/places-of-rank-0.json").read_text())
    assert place["fed"] == 80 and json.loads(place["places"]["0"])["sources"][0]["document"]["epoch"] >= 1

    (tmp_path / "stopped/checkpoint-40/places-of-rank-0.json").write_text(json.dumps(place | {"ranks": 2}))
    with pytest.raises(ValueError, match="was written by 2 ranks and there are 1"):
        run("stopped")


def test_names_of_the_hub(monkeypatch):
    """What `load_dataset` is asked for; there is no network here."""
    asked = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda *where, **how: asked.append((*where, how)) or types.SimpleNamespace(column_names=["text", "id"])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    open_split(HUB_TEXTS["fineweb-edu"], "train")
    open_split(HUB_TEXTS["slimpajama"], "validation")
    open_split(hub_text("hub:someone/prose:small"), "train")
    streaming = {"streaming": True}
    assert asked == [
        ("HuggingFaceFW/fineweb-edu", "sample-100BT", {"split": "train"} | streaming),
        ("cerebras/SlimPajama-627B", None, {"split": "validation"} | streaming),
        ("someone/prose", "small", {"split": "train"} | streaming),
    ]
    assert hub_text("fineweb-edu") is HUB_TEXTS["fineweb-edu"] and hub_text("stdlib") is None and hub_text("some/folder") is None
    fake.load_dataset = lambda *where, **how: types.SimpleNamespace(column_names=["content"])
    with pytest.raises(ValueError, match="has no column 'text'; it has content"):
        open_split(HUB_TEXTS["fineweb-edu"], "train")


def test_a_data_set_that_is_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot stream"):
        open_split(HubText(repository=str(tmp_path / "empty")), "train")


def test_kept_and_joined_documents(folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    kept = keep_documents("first", lambda: held_out(HubText(repository=folder)), byte_tokenizer())
    assert len(kept) == 90 and keep_documents("first", lambda: iter(()), byte_tokenizer()).key == kept.key  # asked for once
    joined = join([corpus, kept])
    assert len(joined) == len(corpus) + 90 and joined.total == corpus.total + kept.total == len(joined.tokens)
    for i in range(len(joined)):
        part, place = (corpus, i) if i < len(corpus) else (kept, i - len(corpus))
        assert joined[i].tolist() == part[place].tolist() and joined.names[i] == part.names[place] and joined.bytes[i] == part.bytes[place]
