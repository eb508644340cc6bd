"""What the tests of the engine share: tiny models with a byte tokenizer, and what an answer must be."""

import functools

import torch

from fastweights.generate import Completion, Engine, Sampling
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model

KINDS = {
    "kla+ccq": {"mixer": "kla+ccq"},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "gla": {"mixer": "gla"},
    "mamba2": {"mixer": "mamba2+ccq"},
    "hybrid": {"mixer": ["kla+ccq", "softmax"], "window_size": 5},
    "softmax": {"mixer": "softmax"},
    "all of CCQ": {"mixer": "kla+ccq", "ccq_forget": "memory", "ccq_strength": "learned", "ccq_unit_keys": True},
    "grouped, no conv, no MLP": {"mixer": "kla+ccq", "num_value_heads": 4, "conv_size": 0, "intermediate_size": 0},
    "1/t": {"mixer": "kla", "sequence_factor": "1/t"},
}


@functools.cache
def model(kind="kla+ccq"):
    """Over 61 tokens without text; nobody changes it."""
    return tiny_model(**KINDS[kind])


@functools.cache
def text_model():
    """Over bytes. It has learnt nothing and writes nonsense, with every byte and many that are no text."""
    return tiny_model(mixer="kla+ccq", vocab_size=258)


def engine(kind="kla+ccq", **arguments) -> Engine:
    """On a model without text, with all sizes small enough to be met often."""
    return Engine(model(kind), **{"rows": 3, "prefill_chunk": 5, "max_context": 120} | arguments)


def text_engine(**arguments) -> Engine:
    return Engine(text_model(), byte_tokenizer(), **{"rows": 3, "prefill_chunk": 5} | arguments)


def prompt(length, seed=None, vocabulary=61) -> list[int]:
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


def generated(model, prompt, new, **arguments) -> list[int]:
    """What transformers' own ``generate`` says, greedily."""
    ids = torch.tensor([prompt])
    arguments = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)} | arguments
    return model.generate(ids, max_new_tokens=new, **arguments)[0, len(prompt) :].tolist()


@torch.no_grad()
def assert_same(model, prompt, tokens, expected) -> None:
    """Equal; but after a token where the best two were within 1e-5, nothing is asked."""
    for i, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:
            best = model(torch.tensor([[*prompt, *tokens[:i]]])).logits[0, -1].topk(2).values
            assert best[0] - best[1] < 1e-5, f"token {i} is {token}, expected {other}"
            return


def assert_greedy(model, prompt, completion: Completion, new=20, **arguments) -> None:
    assert completion.error is None and completion.prompt_tokens == len(prompt)
    assert_same(model, prompt, completion.tokens, generated(model, prompt, new, **arguments))


def greedy(new=20, **arguments) -> Sampling:
    return Sampling(max_new_tokens=new, **arguments)
