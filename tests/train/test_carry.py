"""Memory carried over windows: what a window computes is what it would compute at its place in a pass over the whole document."""

import dataclasses

import pytest
import torch
from torch import nn

from fastweights.models import FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train.carry import LaneBatches
from fastweights.train.corpus import load_corpus
from fastweights.train.presets import TrainSettings
from fastweights.train.stream import CorpusStream, Stream
from fastweights.train.tokenizer import byte_tokenizer
from fastweights.train.trainer import train

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 32}
STILL = TrainSettings(
    steps=12, batch_tokens=64, sequence_length=16, accumulation=2, carry_memory=True, learning_rate=1e-30, log_every=1, save_every=100
)
"""Four lanes in two pieces, over two epochs; no step moves a weight."""
ALONE = dataclasses.replace(STILL, steps=6, batch_tokens=16, accumulation=1)
"""One lane of one document."""


def make(mixer="kla+ccq", **changes):
    torch.manual_seed(0)
    return FastWeightsForCausalLM(FastWeightsConfig(vocab_size=258, mixer=mixer, initializer_range=0.2, **SHAPE | changes))


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen. Winston Smith, his chin")
    return load_corpus([str(tmp_path / "page.txt")], byte_tokenizer(), cache=tmp_path / "cache")


def losses(training):
    return torch.tensor([entry["loss"] for entry in training.history])


def test_windows_of_a_document_are_one_pass_over_it(page, tmp_path):
    """The losses in training of six windows, and each one's gradient: through its own tokens, with what came before as numbers."""
    model = make(num_hidden_layers=2).train()
    whole = model.token_losses(torch.from_numpy(page[0].astype("int64"))[None])[0].detach()
    training = train(model, page, ALONE, folder=tmp_path)
    expected = torch.stack([whole[16 * i : 16 * i + 15].mean() for i in range(6)])  # the first token of a window has nothing to predict it
    torch.testing.assert_close(losses(training), expected, rtol=1e-5, atol=0)

    cache, norms = FastWeightsCache(model.config), []
    for i in range(6):
        ids = torch.from_numpy(page[0][16 * i : 16 * i + 16].astype("int64"))[None]
        model.zero_grad()
        model(ids, labels=ids, cache=cache).loss.backward()
        cache.batch_select_indices(torch.tensor([0]))
        cache._map_rows(torch.Tensor.detach)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    torch.testing.assert_close(torch.tensor([entry["grad_norm"] for entry in training.history]), torch.stack(norms), rtol=1e-4, atol=0)

    alone = model.token_losses(torch.from_numpy(page[0][16:32].astype("int64"))[None])[0, :15].mean()
    assert (alone - expected[1]).abs() > 1e-2  # what the memory is worth


@pytest.mark.parametrize("mixer", ["kla+ccq", pytest.param("gla", marks=pytest.mark.full)])
def test_a_document_begins_from_nothing_and_goes_on_from_what_its_lane_has_read(mixer, corpus, tmp_path):
    """In several lanes, pieces and epochs: every window's loss is that of its documents, each read alone from where the lane began it."""
    model = make(mixer).eval()
    rows = LaneBatches(corpus, sequence_length=16, windows=2, count=24, lanes=4)
    begun, expected, continued = [None] * 4, [], 0
    for step in range(12):
        total, targets = torch.tensor(0.0), 0
        for piece in (0, 1):
            for place, (epoch, window) in enumerate(rows._window_numbers(2 * step + piece)):
                lane = 2 * piece + place
                for document, begin, end in rows._pieces(epoch, window):
                    if begun[lane] is None or begun[lane][:3] != (epoch, document, begin):
                        begun[lane] = (epoch, document, begin, begin)
                    else:
                        continued += 1
                    first = begun[lane][3]
                    begun[lane] = (epoch, document, end, first)
                    ids = torch.from_numpy(corpus[document][first:end].astype("int64"))[None]
                    with torch.no_grad():
                        total += model.token_losses(ids)[0, begin - first : end - first - 1].sum()
                    targets += end - begin - 1
                if step % rows.windows_per_lane == rows.windows_per_lane - 1:
                    begun[lane] = None
        expected.append(total / targets)
    assert continued > 20 and rows.windows_per_lane < 12
    settings = dataclasses.replace(STILL, activation_checkpointing=mixer == "gla")
    torch.testing.assert_close(losses(train(model, corpus, settings, folder=tmp_path)), torch.stack(expected), rtol=1e-5, atol=0)


def test_a_lane_reads_the_text_in_order(corpus):
    """All lanes together read an epoch once, but for a rest; a row says where it goes on; ranks and pieces share out the lanes."""
    rows = LaneBatches(corpus, sequence_length=8, windows=4, count=40, lanes=4)
    order, *_ = rows._order(0)
    stream = [token for document in order for token in corpus[int(document)].tolist()]
    fed = torch.cat([rows[step]["input_ids"].view(4, 8) for step in range(rows.windows_per_lane)], dim=1)
    assert fed.flatten().tolist() == stream[: fed.numel()] and len(stream) - fed.numel() < 5 * 8
    assert rows[0]["continued"].tolist() == rows[rows.windows_per_lane]["continued"].tolist() == [False] * 4
    for step in range(1, rows.windows_per_lane):
        assert rows[step]["continued"].tolist() == [token != 256 for token in rows[step]["input_ids"].view(4, 8)[:, 0].tolist()]
    shared = [LaneBatches(corpus, sequence_length=8, windows=1, count=80, lanes=4, rank=rank, ranks=2) for rank in (0, 1)]
    for step in range(40):
        pieces = [rank[2 * step + piece]["input_ids"] for piece in (0, 1) for rank in shared]
        assert torch.equal(torch.cat(pieces, dim=1), rows[step]["input_ids"])


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "activation_checkpointing": True}])
def test_stopped_twice_and_resumed_is_the_straight_run(changes, corpus, tmp_path):
    """Within an epoch and after its end, with documents that go on at both places: losses and weights bit for bit."""
    settings = dataclasses.replace(STILL, learning_rate=1e-2, **changes)

    def run(folder, stop_at=None):
        model, done = make(), []
        training = train(
            model,
            corpus,
            settings,
            folder=tmp_path / folder,
            on_step=lambda step, logs: done.append(step),
            should_stop=lambda: done[-1] == stop_at,
        )
        return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in training.history], model

    rows = LaneBatches(corpus, sequence_length=16, windows=4, count=12, lanes=4)
    assert rows[3]["continued"].any() and rows.windows_per_lane < 10 and rows[10]["continued"].any()
    straight, model = run("straight")
    for stop_at in (3, 10, None):
        resumed, twin = run("stopped", stop_at)
    assert resumed == straight and len(straight) == 12 and straight[-1][1] < straight[0][1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    file = tmp_path / "stopped/checkpoint-12/carried-by-rank-0.pt"
    file.rename(file.with_name("carried-by-rank-1.pt"))
    with pytest.raises(ValueError, match="was written by fewer ranks and there are 1; carried memory is shared out by ranks"):
        run("stopped")


def test_what_cannot_be_carried_is_refused(corpus, page, llama, tmp_path):
    stream = Stream([CorpusStream(corpus, seed=0)], [1.0])
    for model, text, message in [
        (llama(), corpus, "is for fastweights models, and this is a llama"),
        (make(["kla", "softmax"], num_hidden_layers=2), corpus, r"softmax layers \(mixer=\['kla', 'softmax'\]\) have no memory to hand on"),
        (make(), stream, "lanes of streamed or mixed text cannot be resumed"),
        (make(), page, "98 tokens of text do not fill one window of sequence_length=16 in each of 8 lanes"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(model, text, dataclasses.replace(STILL, batch_tokens=128), folder=tmp_path)
