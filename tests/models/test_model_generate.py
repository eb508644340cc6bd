"""``generate``: greedy, sampling, beams, padded batches, going on from a cache; and refusals with their reason."""

import pytest
import torch

from fastweights.models import FastWeightsCache
from fastweights.models.modeling import CACHE
from tests.models.test_model_padding import padded
from tests.models.tiny import SOME_KINDS, kinds, tiny_model, tokens

NEW = 20


def assert_greedy(model, ids):
    """Each of the last NEW tokens is what the whole text before it asks for, in one pass without a cache."""
    logits = model(ids, use_cache=False).logits[:, -NEW - 1 : -1]
    best = logits.topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-5, "the seed gives a tie, where tokens may differ; take another"
    assert torch.equal(logits.argmax(-1), ids[:, -NEW:])


def greedy(model, ids, **arguments):
    arguments = {"max_new_tokens": NEW} | arguments
    if ids is not None:  # without a mask, ``generate`` would take prompt tokens that equal pad_token_id for padding
        arguments.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, do_sample=False, pad_token_id=0, **arguments)


@pytest.mark.parametrize("kind", kinds(SOME_KINDS, quick=("hybrid",)))
@torch.no_grad()
def test_greedy_tokens_alone_and_padded(kind):
    model = tiny_model(**SOME_KINDS[kind])
    prompts = [tokens(1, n, seed=n) for n in (7, 1, 12)]
    texts = [greedy(model, prompt) for prompt in prompts]
    for text in texts:
        assert_greedy(model, text)
    new = torch.cat([text[:, -NEW:] for text in texts])
    assert len(new.unique()) > 10, "these models repeat themselves, and would not notice a wrong state"
    ids, mask = torch.cat([tokens(1, 3), prompts[0]], dim=1), torch.tensor([[0] * 3 + [1] * 7])
    assert torch.equal(greedy(model, ids, attention_mask=mask)[:, -NEW:], new[:1])
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        assert torch.equal(greedy(model, ids, attention_mask=mask)[:, -NEW:], new)
    with pytest.raises(ValueError, match="needs prompts padded on the left"):
        greedy(model, ids, attention_mask=mask, prefill_chunk_size=5)
    ids, mask = padded(prompts, "left")
    assert torch.equal(greedy(model, ids, attention_mask=mask, prefill_chunk_size=5)[:, -NEW:], new)


@pytest.mark.parametrize("kind", kinds(SOME_KINDS, quick=("hybrid",)))
@torch.no_grad()
def test_beam_search_with_the_cache_equals_without(kind):
    """Beams change places at almost every step, so a cache that is not reordered gives other tokens."""
    model = tiny_model(**SOME_KINDS[kind])
    ids, mask = padded([tokens(1, n, seed=n) for n in (7, 4)], "left")
    options = {
        "num_beams": 4,
        "num_return_sequences": 2,
        "max_new_tokens": 12,
        "do_sample": False,
        "attention_mask": mask,
        "pad_token_id": 0,
    }
    moves = []
    reorder = FastWeightsCache.reorder_cache
    try:
        FastWeightsCache.reorder_cache = lambda self, beam_idx: (moves.append(beam_idx.tolist()), reorder(self, beam_idx))[1]
        with_cache = model.generate(ids, use_cache=True, **options)
    finally:
        FastWeightsCache.reorder_cache = reorder
    assert any(move != sorted(move) or len(set(move)) < len(move) for move in moves)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_sampling_draws_the_same_with_and_without_the_cache():
    model, ids = tiny_model(), tokens(2, 6)
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        samples.append(model.generate(ids, max_new_tokens=6, do_sample=True, num_return_sequences=3, use_cache=use_cache, pad_token_id=0))
    assert samples[0].shape == (6, 12) and torch.equal(*samples) and len(samples[0].unique(dim=0)) == 6


@pytest.mark.parametrize("kind", kinds(SOME_KINDS, quick=("hybrid",)))
@torch.no_grad()
def test_going_on_from_a_cache(kind):
    """All of the text with the cache of its beginning, or only the new tokens with a mask over all; and two ways on from one snapshot."""
    model, ids = tiny_model(**SOME_KINDS[kind]), tokens(2, 11)
    expected = greedy(model, ids)
    cache = FastWeightsCache(model.config)
    model(ids[:, :6], cache=cache)
    assert torch.equal(greedy(model, ids, **{CACHE: cache.copy()}), expected)
    assert torch.equal(greedy(model, ids[:, 6:], attention_mask=torch.ones_like(ids), **{CACHE: cache.copy()})[:, 5:], expected[:, 11:])
    out = greedy(model, ids, return_dict_in_generate=True, **{CACHE: cache})
    assert torch.equal(out.sequences, expected) and out[CACHE] is cache and cache.get_seq_length() == 11 + NEW - 1
    longer = torch.cat([expected, tokens(2, 4)], dim=1)
    assert torch.equal(greedy(model, longer, **{CACHE: cache}), greedy(model, longer))


@torch.no_grad()
def test_embeddings_as_prompt():
    model, ids = tiny_model(), tokens(2, 6)
    new = greedy(model, None, inputs_embeds=model.model.embed_tokens(ids), max_new_tokens=5)
    assert torch.equal(new, greedy(model, ids, max_new_tokens=5)[:, 6:])


def test_refusals():
    model, ids = tiny_model(), tokens(1, 6)
    for arguments, message in (
        ({"prompt_lookup_num_tokens": 3}, "takes tokens back.*Supported: greedy_search, sample, beam_search, beam_sample"),
        ({"assistant_model": tiny_model(seed=1)}, "takes tokens back"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "takes tokens back"),
        ({"cache_implementation": "static"}, "cache_implementation='static' is not supported"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' is not supported"),
        ({"is_assistant": True}, "cannot draft"),
        ({"cache_implementation": "paged"}, "continuous batching.*a fast-weight memory has none"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=3, **arguments)


@torch.no_grad()
def test_it_cannot_draft_for_another_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    other = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
    with pytest.raises(ValueError, match="cannot draft"):
        other.generate(tokens(1, 6), assistant_model=tiny_model(), max_new_tokens=3)
