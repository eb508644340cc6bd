"""A sequence through the cache in pieces is the sequence in one pass; and rows of a cache can be moved, copied and dropped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.models import FastWeightsCache
from fastweights.models.modeling import CACHE
from tests.models.tiny import EVERY_KIND, PAIRWISE, SOME_KINDS, Truth, kinds, tiny_config, tiny_model, tokens


def tensors(state):
    return [state] if isinstance(state, torch.Tensor) else [t for part in state or () for t in tensors(part)]


def all_tensors(cache):
    return [t for state in cache.states for t in tensors(state)]


@torch.no_grad()
def in_pieces(model, ids, pieces):
    cache = FastWeightsCache(model.config)
    logits = [model(piece, cache=cache).logits for piece in ids.split(pieces, dim=1)]
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("kind", kinds(quick=PAIRWISE))
@torch.no_grad()
def test_pieces_of_every_sort_equal_one_pass(kind):
    truth, pieces = Truth(**EVERY_KIND[kind]), [1, 1, 2, 64, 3, 65, 1, 5]
    ids = tokens(2, sum(pieces))
    logits, cache = in_pieces(truth.model, ids, pieces)
    truth.of(lambda model: model(ids).logits)(logits)
    whole = in_pieces(truth.model, ids, [len(ids[0])])[1]
    assert cache.get_seq_length() == whole.get_seq_length() == ids.shape[1]
    assert [t.shape for t in all_tensors(cache)] == [t.shape for t in all_tensors(whole)]
    assert all(s.place.tolist() == [ids.shape[1]] * 2 for s in cache.states)


def check_partition(truth, pieces):
    ids = tokens(2, sum(pieces))
    with torch.no_grad():
        truth.of(lambda model: model(ids).logits)(in_pieces(truth.model, ids, pieces)[0])


partitions = st.lists(st.sampled_from([1, 2, 3, 4, 5, 17, 63, 64, 65]), min_size=2, max_size=5)


@pytest.mark.parametrize("kind", ["kla+ccq", "gla+raw", "hybrid"])
def test_any_partition_equals_one_pass(kind):
    truth = Truth(**SOME_KINDS[kind])
    settings(max_examples=3, deadline=None, derandomize=True, database=None)(
        given(partitions)(lambda pieces: check_partition(truth, pieces))
    )()


@pytest.mark.full
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_many_partitions_equal_one_pass(kind):
    truth = Truth(**EVERY_KIND[kind])
    settings(max_examples=20, deadline=None, derandomize=True, database=None)(
        given(partitions)(lambda pieces: check_partition(truth, pieces))
    )()


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_pieces_with_padding_anywhere_equal_the_rows_alone(kind):
    """Three calls on one cache, each with its own mask: left, right, a row without any token, and a mask over all that was seen."""
    truth = Truth(**SOME_KINDS[kind])
    ids = tokens(3, 20)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :3] = mask[1, 5:9] = mask[2, 4:11] = mask[0, 17:] = 0
    cache = FastWeightsCache(truth.model.config)
    first = truth.model(ids[:, :8], attention_mask=mask[:, :8], cache=cache).logits
    second = truth.model(ids[:, 8:12], attention_mask=mask[:, :12], cache=cache).logits
    third = truth.model(ids[:, 12:], attention_mask=mask[:, 12:], cache=cache).logits
    logits = torch.cat([first, second, third], dim=1)
    assert all(state.place.tolist() == mask.sum(1).tolist() for state in cache.states)
    real = mask.bool()
    truth.of(lambda model: torch.cat([model(ids[row : row + 1, real[row]]).logits[0] for row in range(3)]))(logits[real])


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_packed_prefill_then_batched_steps(kind):
    """With packed documents the cache has one row a document, and goes on as a batch."""
    truth = Truth(**SOME_KINDS[kind])
    documents, steps = [tokens(1, n, seed=n) for n in (7, 1, 12)], tokens(3, 2)
    cache = FastWeightsCache(truth.model.config)
    truth.model(torch.cat(documents, dim=1), cu_seqlens=torch.tensor([0, 7, 8, 20]), cache=cache)
    assert (cache.batch_size, cache.get_seq_length()) == (3, 12)
    logits = truth.model(steps, cache=cache).logits
    wholes = [torch.cat([document, steps[row : row + 1]], dim=1) for row, document in enumerate(documents)]
    truth.of(lambda model: torch.cat([model(whole).logits[:, -2:] for whole in wholes]))(logits)


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_moving_rows(kind):
    model, ids = tiny_model(**SOME_KINDS[kind]), tokens(3, 9)
    cache = in_pieces(model, ids, [9])[1]
    for move, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        moved = cache.copy()
        move(moved)
        assert moved.batch_size == len(rows) and moved.get_seq_length() == 9
        assert all(torch.equal(a, b[rows]) for a, b in zip(all_tensors(moved), all_tensors(cache), strict=True))


@pytest.mark.parametrize("kind", kinds())
@torch.no_grad()
def test_a_call_never_writes_into_given_tensors(kind):
    """A snapshot, a shallow reference to the old states, and the inputs all survive further calls bit for bit."""
    model, ids = tiny_model(**EVERY_KIND[kind]), tokens(2, 9)
    cache = in_pieces(model, ids, [9])[1]
    snapshot, old = cache.copy(), all_tensors(cache)
    before = [t.clone() for t in old]
    again = [model(tokens(2, n, seed=5), cache=snapshot.copy(), attention_mask=None).logits for n in (1, 1, 70, 70)]
    for n in (1, 70):
        model(tokens(2, n, seed=6), cache=cache)
    assert all(torch.equal(a, b) for a, b in zip(old, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(all_tensors(snapshot), before, strict=True))
    assert torch.equal(again[0], again[1]) and torch.equal(again[2], again[3])
    storages = {t.untyped_storage().data_ptr() for t in all_tensors(cache) if t.numel()}
    assert storages.isdisjoint(t.untyped_storage().data_ptr() for t in old if t.numel())


@torch.no_grad()
def test_the_size_does_not_grow_with_the_text():
    model = tiny_model(mixer=["kla+ccq", "softmax"], window_size=5)
    size = [sum(t.numel() for t in all_tensors(in_pieces(model, tokens(1, T), [T])[1])) for T in (16, 160)]
    assert size[0] == size[1]


def test_crop_and_reset():
    model = tiny_model()
    cache = FastWeightsCache(model.config)
    for n in (0, 3, -3):
        cache.crop(n)  # nothing seen, nothing to crop
    assert repr(cache) == "FastWeightsCache(layers=2, rows=-1, seen_tokens=0)" and len(cache) == 2
    model(tokens(2, 9), cache=cache)
    before = all_tensors(cache)
    for n in (0, 9, 12):
        cache.crop(n)
    assert all(a is b for a, b in zip(before, all_tensors(cache), strict=True))
    for n in (-1, -9, 8):
        with pytest.raises(ValueError, match=rf"crop\({n}\).*9 tokens seen.*cache.copy\(\)"):
            cache.crop(n)
    with pytest.raises(ValueError, match=r"cache.copy\(\)"):
        cache.activate_past_recording()
    assert not cache.is_croppable and not cache.is_compileable and cache.is_linear == [False, False]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and cache.get_max_length() == -1
    ids = tokens(2, 5)
    assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_the_cache_by_either_name_and_in_the_output():
    model, ids = tiny_model(), tokens(2, 9)
    cache = model(ids[:, :5]).get(CACHE)
    assert isinstance(cache, FastWeightsCache)
    twin = cache.copy()
    a = model(ids[:, 5:], cache=cache)
    b = model(ids[:, 5:], past_key_values=twin)
    assert a[CACHE] is cache and b[CACHE] is twin and torch.equal(a.logits, b.logits)
    assert model(ids, use_cache=False).get(CACHE) is None
    assert model.train()(ids).get(CACHE) is None
    assert isinstance(model(ids, use_cache=True).get(CACHE), FastWeightsCache)


def test_caches_that_do_not_fit():
    from transformers import DynamicCache

    model, cache = tiny_model(), FastWeightsCache(tiny_config())
    model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match="DynamicCache; this model needs a FastWeightsCache"):
        model(tokens(2, 3), cache=DynamicCache())
    with pytest.raises(ValueError, match="two names"):
        model(tokens(2, 3), cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="holds 2 rows and the input 3"):
        model(tokens(3, 3), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows and the input 1"):
        model(tokens(1, 3), cache=cache, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="holds 3 layers and the model has 2"):
        model(tokens(2, 3), cache=FastWeightsCache(tiny_config(num_hidden_layers=3)))
