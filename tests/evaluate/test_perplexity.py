import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from fastweights.evaluate.perplexity import choose_stretches, score_lengths, stream_nats
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None)
    ).eval()


def kla_ccq():
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_heads=2, expand_k=1.0, expand_v=1.0)
    return FastWeightsForCausalLM(FastWeightsConfig(mixer="kla+ccq", vocab_size=50, **shape)).eval()


MODELS = pytest.mark.parametrize("build", [llama, kla_ccq])


@pytest.fixture
def documents():
    random = np.random.default_rng(0)
    return [random.integers(0, 50, n).astype(np.uint16) for n in (97, 30, 65, 64, 300)]


@MODELS
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_streaming_is_one_pass(build, chunk):
    model, ids = build(), torch.randint(50, (3, 65))
    with torch.inference_mode():
        logits = model(ids[:, :-1]).logits
        pieces = list(stream_nats(model, ids, chunk=chunk))
    assert [begin for begin, _ in pieces] == list(range(0, 64, chunk))
    whole = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(torch.cat([piece for _, piece in pieces], dim=1), whole, rtol=1e-4, atol=1e-5)


def test_memory_does_not_grow_with_the_window():
    """No call sees more than a chunk, and what is carried from chunk to chunk has the same size at 64 and at 1,024 tokens."""
    model, carried = kla_ccq(), {}
    for length in (64, 1024):
        calls = []
        hook = model.register_forward_hook(
            lambda module, args, kwargs, out, calls=calls: calls.append((kwargs["input_ids"].numel(), out)), with_kwargs=True
        )
        with torch.inference_mode():
            list(stream_nats(model, torch.randint(50, (1, length + 1)), chunk=16))
        hook.remove()
        assert len(calls) == length // 16 and {size for size, _ in calls} == {16}
        tensors = [t for state in calls[-1][1][_cache_name(calls[-1][1])].states for t in _leaves(state)]
        carried[length] = sum(t.numel() for t in tensors)
    assert carried[64] == carried[1024] > 0


def _cache_name(output):
    return "cache" if "cache" in output else "past_key_values"


def _leaves(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)


@MODELS
def test_every_length_scores_the_same_tokens_by_hand(build, documents):
    """Against a loop over windows; documents of 97, 65 and 300 tokens hold one, one and four stretches of 64. Two windows of 24 end where
    such a stretch ends, and leave its first 16 tokens out."""
    model, rate = build(), [1.0, 1.0, 2.0, 1.0, 0.5]
    curve = score_lengths(model, documents, lengths=[16, 24, 64], tokens=10**9, bytes_per_token=rate, tail=8, chunk=24)
    for score in curve.lengths:
        bits, byte, tail_bits, tail_byte, nats = {}, {}, 0.0, 0.0, 0.0
        for d, stretches in ((0, 1), (2, 1), (4, 4)):
            starts = {16: (0, 16, 32, 48), 24: (16, 40), 64: (0,)}[score.length]
            for begin in (64 * stretch + start for stretch in range(stretches) for start in starts):
                ids = torch.from_numpy(documents[d][begin : begin + score.length + 1].astype(np.int64))[None]
                with torch.inference_mode():
                    losses = F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none").double() / math.log(2)
                bits[d] = bits.get(d, 0.0) + losses.sum().item()
                byte[d] = byte.get(d, 0.0) + len(losses) * rate[d]
                tail_bits, tail_byte = tail_bits + losses[-8:].sum().item(), tail_byte + 8 * rate[d]
                nats += losses.sum().item() * math.log(2)
        windows = 6 * len(starts)
        assert score.tokens == windows * score.length and score.documents == 3
        assert score.bits_per_byte.value == pytest.approx(sum(bits.values()) / sum(byte.values()), rel=1e-5)
        assert score.bits_per_byte.low < score.bits_per_byte.value < score.bits_per_byte.high
        assert score.tail_bits_per_byte.value == pytest.approx(tail_bits / tail_byte, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(nats / score.tokens), rel=1e-5)
        assert score.tail_perplexity == pytest.approx(math.exp(tail_bits * math.log(2) / (8 * windows)), rel=1e-5)
        assert np.array(score.per_document) == pytest.approx(np.array([[bits[d], byte[d]] for d in (0, 2, 4)]), rel=1e-5)
    positions = curve.positions
    assert [(p.begin, p.end) for p in positions] == [(0, 16), (16, 23), (23, 32), (32, 45), (45, 64)]
    share = [(p.end - p.begin) / 64 * p.bits_per_byte.value for p in positions]
    assert sum(share) == pytest.approx(curve.lengths[-1].bits_per_byte.value, rel=1e-5)


def test_a_uniform_model_has_log2_of_the_vocabulary(documents):
    model = kla_ccq()
    torch.nn.init.zeros_(model.lm_head.weight)
    done = []
    curve = score_lengths(model, documents, lengths=[8, 32], tokens=64, on_progress=lambda *args: done.append(args))
    for score in curve.lengths:
        assert score.bits_per_byte.value == pytest.approx(math.log2(50)) and score.perplexity == pytest.approx(50)
        assert score.tokens == 64 and score.documents == 2
    assert done[-1] == (128, 128)


class Counting(PreTrainedModel):
    """Predicts a token by how often it has seen it (add-one): what context is worth to it can be computed by hand."""

    def __init__(self):
        super().__init__(PreTrainedConfig())
        self.config.vocab_size = 4
        self.place = torch.nn.Parameter(torch.zeros(1))  # a model is where its parameters are

    def forward(self, input_ids, use_cache, cache=None):
        seen = F.one_hot(input_ids, 4).float().cumsum(1) + (0 if cache is None else cache[:, None])
        return ModelOutput(logits=(seen + 1).log(), **({"cache": seen[:, -1]} if use_cache else {}))


def test_what_context_is_worth_is_what_it_is():
    """A text of one token a hundred times: after n of them, 1/(n + 4) of the probability is on each of the others."""
    curve = score_lengths(Counting(), [np.zeros(97, np.uint16)], lengths=[1, 8, 96], tokens=96, chunk=5)
    for score in curve.lengths:
        by_place = [-math.log2((n + 1) / (n + 4)) for n in range(1, score.length + 1)]
        assert score.bits_per_byte.value == pytest.approx(np.mean(by_place), rel=1e-5)
    values = [score.bits_per_byte.value for score in curve.lengths]
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(math.log2(5 / 2), rel=1e-5)


def test_stretches_are_drawn_from_anywhere_the_same_each_time():
    lengths = [97, 30, 65, 64, 300]
    everything = choose_stretches(lengths, 32, 10**9)
    assert sorted(everything) == [(0, 0), (0, 32), (0, 64), (2, 0), (2, 32), (3, 0), *((4, begin) for begin in range(0, 288, 32))]
    assert choose_stretches(lengths, 32, 200) == everything[:6] and everything != sorted(everything)
    assert len(choose_stretches(lengths, 64, 1)) == 1
    begins = [begin / 10_000 for _, begin in choose_stretches([10_001] * 50, 10, 20_000)]
    assert np.mean(begins) == pytest.approx(0.5, abs=0.03) and np.std(begins) == pytest.approx(
        12**-0.5, abs=0.02
    )  # not the beginnings alone
    with pytest.raises(ValueError, match="no document has 513 tokens; the longest of 5 has 300"):
        choose_stretches(lengths, 512, 512)


def test_impossible_lengths(documents):
    with pytest.raises(ValueError, match="each must be positive"):
        score_lengths(llama(), documents, lengths=[0, 64], tokens=64)


MILLION = """
import json, pathlib, re, sys
import torch
from torch.nn import functional as F
from fastweights.evaluate.perplexity import stream_nats
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

def peak():  # getrusage would go on from the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

torch.manual_seed(0)
shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_heads=1, initializer_range=0.3)
model = FastWeightsForCausalLM(FastWeightsConfig(mixer="kla+ccq", vocab_size=16, **shape)).eval()
ids = torch.randint(16, (1, 2**20 + 1))
streamed = torch.empty(2**20)
with torch.inference_mode():
    for begin, nats in stream_nats(model, ids[:, : 2**16 + 1], chunk=2048):
        streamed[begin : begin + nats.shape[1]] = nats[0]
    short = peak()
    for begin, nats in stream_nats(model, ids, chunk=2048):
        streamed[begin : begin + nats.shape[1]] = nats[0]
    long = peak()
    whole = F.cross_entropy(model(ids[:, :-1], use_cache=False).logits[0], ids[0, 1:], reduction="none")
    one_pass = peak()
error = (streamed - whole).abs().max().item()
print(json.dumps([long - short, one_pass - long, error, whole.std().item(), streamed.double().mean().item(), whole.double().mean().item()]))
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_million_tokens_in_constant_memory_are_one_pass():
    """In a process of its own, whose peak is its own: sixteen times the tokens cost next to nothing, and one pass hundreds of MB."""
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=True)
    more, one_pass, error, spread, streamed, whole = json.loads(done.stdout)
    assert one_pass > 300e6 and more < one_pass / 20
    assert error < 1e-4 * spread and streamed == pytest.approx(whole, rel=1e-6)
