"""A captured piece of a text, with a stand-in for the graph, which needs a GPU."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from fastweights.generate.captured import CapturedPiece
from fastweights.generate.passes import Passes
from tests.generate.common import model
from tests.models.tiny import tokens


@torch.inference_mode()
def test_threads_that_read_at_once_have_each_their_own_text(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    passes = Passes(model())
    piece = CapturedPiece(passes._read, 7, passes.initial_states())

    class Graph:
        @torch.inference_mode()
        def replay(self):
            time.sleep(0.02)  # others come in here
            x, after = passes._read(piece._ids, piece._before)
            piece._x.copy_(x)
            piece._after = after

    piece._graph = Graph()
    texts = [tokens(1, 7, seed=seed) for seed in range(4)]
    begun = [passes.read(text[0], passes.initial_states())[1] for text in texts]
    expected = [passes._read(text, states) for text, states in zip(texts, begun, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(torch.inference_mode()(piece), texts, begun))
    for (x, states), (right, after) in zip(found, expected, strict=True):
        torch.testing.assert_close(x, right, rtol=0, atol=0)
        for state, other in zip(states, after, strict=True):
            torch.testing.assert_close(state.memory, other.memory, rtol=0, atol=0)
