"""Padding is left out and packed documents do not see each other, exactly, in outputs, losses and gradients."""

import itertools

import pytest
import torch

from tests.models.tiny import EVERY_KIND, PAIRWISE, SOME_KINDS, Truth, kinds, tiny_model, tokens

LENGTHS = (7, 1, 12)
CU_SEQLENS = torch.tensor([0, 7, 8, 20])


def padded(documents, side):
    """The documents as a batch padded on one side with token 0, and its mask."""
    T = max(d.shape[1] for d in documents)
    ids, mask = torch.zeros(len(documents), T, dtype=torch.long), torch.zeros(len(documents), T, dtype=torch.long)
    for row, document in enumerate(documents):
        n = document.shape[1]
        where = slice(T - n, T) if side == "left" else slice(0, n)
        ids[row, where], mask[row, where] = document[0], 1
    return ids, mask


def documents():
    return [tokens(1, n, seed=n) for n in LENGTHS]


@pytest.mark.parametrize("kind", kinds(quick=PAIRWISE))
@torch.no_grad()
def test_padded_and_packed_rows_equal_the_rows_alone(kind):
    truth = Truth(**EVERY_KIND[kind])

    check = truth.of(lambda model: torch.cat([model(document).logits for document in documents()], dim=1))
    check(truth.model(torch.cat(documents(), dim=1), cu_seqlens=CU_SEQLENS).logits)
    for side in ("left", "right"):
        ids, mask = padded(documents(), side)
        check(truth.model(ids, attention_mask=mask).logits[mask.bool()].unsqueeze(0))


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_padding_at_batch_size_one(kind):
    truth, ids = Truth(**SOME_KINDS[kind]), tokens(1, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
    truth.of(lambda model: model(ids[:, 2:7]).logits)(truth.model(ids, attention_mask=mask).logits[:, 2:7])


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_a_mask_of_ones_changes_nothing(kind):
    model, ids = tiny_model(**SOME_KINDS[kind]), tokens(3, 20)
    plain = model(ids).logits
    for dtype in (torch.long, torch.bool, torch.uint8):
        assert torch.equal(model(ids, attention_mask=torch.ones(3, 20, dtype=dtype)).logits, plain)
    ones = torch.ones(1, 20, dtype=torch.long)
    packed = model(ids[:1], cu_seqlens=CU_SEQLENS).logits
    assert torch.equal(model(ids[:1], cu_seqlens=CU_SEQLENS, attention_mask=ones).logits, packed)
    assert not torch.equal(packed, plain[:1])


@torch.no_grad()
def test_padded_positions_repeat_the_last_real_output():
    model, ids = tiny_model(), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(out.logits[0, 3:], out.logits[0, 3:4].expand(3, -1))
    assert not out.logits[0, :2].any() and not out.logits[1].any()
    assert len(out.hidden_states) == 3 and all(h.shape == (2, 6, 32) for h in out.hidden_states)
    assert torch.equal(out.hidden_states[0][0, 2:4], model.model.embed_tokens(ids[0, 2:4]))


@pytest.mark.parametrize("kind", kinds(quick=PAIRWISE))
def test_changing_one_document_leaves_the_others_bits(kind):
    """Outputs and states forward; gradients backward, for a loss on one document must not reach another's embeddings."""
    model = tiny_model(**EVERY_KIND[kind])
    first, other = tokens(1, 20), tokens(1, 20)
    other[:, :7] = tokens(1, 7, seed=9)
    with torch.no_grad():
        a, b = (model(ids, cu_seqlens=CU_SEQLENS, use_cache=True) for ids in (first, other))
    assert not torch.equal(a.logits[:, :7], b.logits[:, :7])
    assert torch.equal(a.logits[:, 7:], b.logits[:, 7:])
    embeds = model.model.embed_tokens(first).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds, cu_seqlens=CU_SEQLENS).logits[:, 7:8].square().sum(), embeds)
    assert gradient[:, 7:8].any() and not gradient[:, :7].any() and not gradient[:, 8:].any()


@pytest.mark.parametrize("kind", kinds(quick=("two rules", "hybrid", "grouped, no conv, no MLP")))
def test_gradients_of_packed_and_padded_documents_are_those_of_the_documents_alone(kind):
    def gradients(model, run):
        model.zero_grad()
        run(model).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def alone(model):
        losses = [model(d, labels=d).loss * (d.shape[1] - 1) for d in documents() if d.shape[1] > 1]
        return torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))

    def packed(model):
        ids = torch.cat(documents(), dim=1)
        return model(ids, labels=ids, cu_seqlens=CU_SEQLENS).loss

    def in_batch(side):
        ids, mask = padded(documents(), side)
        return lambda model: model(ids, labels=ids, attention_mask=mask).loss

    truth = Truth(**EVERY_KIND[kind])
    check = truth.of(lambda model: gradients(model, alone))
    for run in (packed, in_batch("left"), in_batch("right")):
        check(gradients(truth.model, run))


@torch.no_grad()
def test_empty_documents_and_empty_rows():
    truth, ids = Truth(), tokens(1, 8)
    out = truth.model(ids, labels=ids, cu_seqlens=torch.tensor([0, 0, 3, 3, 8, 8]), use_cache=True)
    parts = torch.cat([truth.model(ids[:, :3]).logits, truth.model(ids[:, 3:]).logits], dim=1)
    truth.of(lambda model: torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], dim=1))(out.logits)
    expected = torch.nn.functional.cross_entropy(parts[0, [0, 1, 3, 4, 5, 6]], ids[0, [1, 2, 4, 5, 6, 7]])
    torch.testing.assert_close(out.loss, expected)
    empty = truth.model(ids[:, :0], use_cache=True)
    assert empty.logits.shape == (1, 0, 61)


def test_what_cannot_be_masked_or_packed():
    model, ids = tiny_model(), tokens(2, 6)
    for mask, message in (
        (torch.ones(2, 1, 6, 6, dtype=torch.long), r"must be \[B, T\] of integers or booleans.*\[2, 1, 6, 6\]"),
        (torch.zeros(2, 6), "got .* of torch.float32"),
        (torch.ones(2, 5, dtype=torch.long), r"\[2, 5\] for input of \[2, 6\]"),
        (torch.ones(1, 6, dtype=torch.long), r"\[1, 6\] for input of \[2, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="leave the padding out"):
        model(ids[:1], cu_seqlens=torch.tensor([0, 6]), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    for cu_seqlens in ([0, 3, 6], [1, 6], [0, 4, 3, 6], [0, 5]):
        with pytest.raises(ValueError):
            model(ids if cu_seqlens == [0, 3, 6] else ids[:1], cu_seqlens=torch.tensor(cu_seqlens))
    for arguments in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(2, 6, 32)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**arguments)


@pytest.mark.parametrize("kind", kinds(SOME_KINDS, quick=("hybrid",)))
@torch.no_grad()
def test_every_mask_of_four_tokens(kind):
    """Holes included: what is masked does not exist."""
    truth, ids = Truth(**SOME_KINDS[kind]), tokens(1, 4)
    masks = [torch.tensor([bits]).bool() for bits in itertools.product((0, 1), repeat=4) if any(bits)]
    check = truth.of(lambda model: torch.cat([model(ids[real].unsqueeze(0)).logits[0] for real in masks]))
    check(torch.cat([truth.model(ids, attention_mask=real).logits[real] for real in masks]))
