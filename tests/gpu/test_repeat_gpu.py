"""The same call twice gives the same bits, at the size of a training: thousands of programs in flight, and another stream on the card.

Experiment 012 has two trainings of one command that part, of delta rules and of no other mixer: this puts the question to layers and ops.
"""

import pytest
import torch
import torch.nn.functional as F

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.ops.functional import decay_memory
from fastweights.recipes.settings import Variant
from fastweights.train.presets import ModelSize
from tests.ops.grid import bounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.delta.chunk_triton import delta_backward, delta_forward, tiles_for

MIXERS = ("gla", "mamba2", "retention", "deltanet", "gated_deltanet", "kla", "gla+ccq", "gated_deltanet+ccq", "kla+ccq")
TOKENS, HEADS, K = 65_536, 6, 64
SHAPE = ModelSize(hidden_size=HEADS * K, num_hidden_layers=1, num_heads=HEADS, intermediate_size=0)


@pytest.fixture
def documents():
    """Windows of 4,096 tokens, most of them of several documents."""
    lengths = [4096, 1, 4095, 700, 3396, 2048, 1500, 548, 64, 63, 129, 3840] * 3 + [128] * 32
    assert sum(lengths) == TOKENS
    return bounds(lengths).int().cuda()


def differing(once, runs):
    """Names of what `once` does not give alike in all runs, and in how many it is not as the first time."""
    first = once()
    differ = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in first}
    other, work = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(runs):
        with torch.cuda.stream(other):
            torch.mm(work, work)
        for name, x in once().items():
            differ[name] += (x != first[name]).any()
    return {name: times.item() for name, times in differ.items() if times}


def repeated(call, leaves, upstream, runs):
    def once():
        y = call()
        return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), upstream), strict=True))

    return differing(once, runs)


@pytest.mark.parametrize("mixer", MIXERS)
def test_layers(mixer, documents):
    torch.manual_seed(0)
    config = FastWeightsConfig(**Variant.parse(mixer).config(SHAPE, vocab_size=64))
    layer = FastWeightsForCausalLM(config).cuda().model.layers[0]
    x = torch.randn(1, TOKENS, SHAPE.hidden_size, device="cuda", requires_grad=True)

    def call():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(x, cu_seqlens=documents)[0]

    assert repeated(call, {"x": x, **dict(layer.named_parameters())}, torch.randn_like(x), runs=40) == {}


def draw():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, K, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    beta = torch.rand(1, TOKENS, HEADS, device="cuda").requires_grad_()
    log_decay = F.logsigmoid(torch.randn(1, TOKENS, HEADS, device="cuda") + 4).requires_grad_()
    key_scale = k.detach().float().norm(dim=-1).reciprocal().requires_grad_()
    return dict(q=q, k=k, v=v, beta=beta, log_decay=log_decay, key_scale=key_scale)


def test_delta_by_kernel(documents):
    """What differs names the kernel: rates; inverse and scores (prepare); o (walk). The backward's three together, of one forward."""
    x = {name: t.detach() for name, t in draw().items()}
    tiles = list(tiles_for(x["q"], x["k"], x["v"]))
    given = (x["q"], x["k"], x["v"], x["beta"], x["log_decay"], x["key_scale"], None, None, None, documents, 1.0, tiles)
    begin, length = documents[:-1].tolist(), documents.diff().tolist()
    first = [start // tiles[0] + document for document, start in enumerate(begin)]
    live = torch.cat([number + torch.arange(-(-tokens // tiles[0])) for number, tokens in zip(first, length, strict=True)]).cuda()

    def forward():
        o, final, inverse, scores, rates, *_ = delta_forward(*given)
        return {"rates": rates, "inverse": inverse, "scores": scores, "o": o, "final": final}

    def only_live():  # what no token has is never written
        return {name: t[live] if name in ("rates", "inverse", "scores") else t for name, t in forward().items()}

    def backward():
        found = delta_backward(*given, upstream, None, kept["inverse"], kept["scores"], kept["rates"], nothing, nothing)
        return dict(zip(("q", "k", "v", "beta", "log_decay", "key_scale"), found[:6], strict=True))

    kept, upstream, nothing = forward(), torch.randn_like(x["v"]), torch.empty(0, device="cuda")
    assert (differing(only_live, 2_000), differing(backward, 1_000)) == ({}, {})


def test_decay(documents):
    x = draw()
    del x["beta"], x["key_scale"]
    assert repeated(lambda: decay_memory(**x, cu_seqlens=documents, backend="triton")[0], x, torch.randn_like(x["v"]), runs=1_000) == {}
