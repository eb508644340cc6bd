"""The same call twice gives the same bits, at the size of a training: thousands of programs in flight, and another stream on the card.

Experiment 012 has two trainings of one command that part, of delta rules and of no other mixer: this puts the question to layers and ops.
"""

import pytest
import torch
import torch.nn.functional as F

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.ops.functional import decay_memory, delta_memory
from fastweights.recipes.settings import Variant
from fastweights.train.presets import ModelSize
from tests.ops.grid import bounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MIXERS = ("gla", "mamba2", "retention", "deltanet", "gated_deltanet", "kla", "gla+ccq", "gated_deltanet+ccq", "kla+ccq")
TOKENS, HEADS, K, RUNS = 65_536, 6, 64, 40
SHAPE = ModelSize(hidden_size=HEADS * K, num_hidden_layers=1, num_heads=HEADS, intermediate_size=0)


@pytest.fixture
def documents():
    """Windows of 4,096 tokens, most of them of several documents."""
    lengths = [4096, 1, 4095, 700, 3396, 2048, 1500, 548, 64, 63, 129, 3840] * 4
    return bounds([*lengths, TOKENS - sum(lengths)]).int().cuda()


def repeated(call, leaves, upstream):
    """Names of what differs from the first run in any of RUNS, and in how many; something else keeps the card busy."""

    def once():
        y = call()
        return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream), strict=True))

    first, differ = once(), dict.fromkeys(["y", *leaves], 0)
    other, work = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(RUNS):
        with torch.cuda.stream(other):
            torch.mm(work, work)
        for name, x in once().items():
            differ[name] += not torch.equal(x, first[name])
    return {name: times for name, times in differ.items() if times}


@pytest.mark.parametrize("mixer", MIXERS)
def test_layers(mixer, documents):
    torch.manual_seed(0)
    config = FastWeightsConfig(**Variant.parse(mixer).config(SHAPE, vocab_size=64))
    layer = FastWeightsForCausalLM(config).cuda().model.layers[0]
    x = torch.randn(1, TOKENS, SHAPE.hidden_size, device="cuda", requires_grad=True)

    def call():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(x, cu_seqlens=documents)[0]

    assert repeated(call, {"x": x, **dict(layer.named_parameters())}, torch.randn_like(x)) == {}


def draw():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, K, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    beta = torch.rand(1, TOKENS, HEADS, device="cuda").requires_grad_()
    log_decay = F.logsigmoid(torch.randn(1, TOKENS, HEADS, device="cuda") + 4).requires_grad_()
    key_scale = k.detach().float().norm(dim=-1).reciprocal().requires_grad_()
    return dict(q=q, k=k, v=v, beta=beta, log_decay=log_decay, key_scale=key_scale)


def test_delta(documents):
    x = draw()
    assert repeated(lambda: delta_memory(**x, cu_seqlens=documents, backend="triton")[0], x, torch.randn_like(x["v"])) == {}


def test_decay(documents):
    x = draw()
    del x["beta"], x["key_scale"]
    assert repeated(lambda: decay_memory(**x, cu_seqlens=documents, backend="triton")[0], x, torch.randn_like(x["v"])) == {}
