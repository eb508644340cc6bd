"""The adapter: right against a plain pass and against the harness's own, whatever the batch; masks, lengths and cuts."""

import logging

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch.nn import functional as F

from fastweights.evaluate.harness.model import NO_LIMIT, HarnessModel
from fastweights.train.tokenizer import byte_tokenizer
from tests.evaluate.rows import SENTENCES, kla_ccq, llama

MODELS = pytest.mark.parametrize("build", [kla_ccq, llama])
PAIRS = [
    ("The miller", " carried the sacks"),
    ("A lamp stood in the window of the harbour office", " all night"),
    ("A lamp stood in the window of the harbour office", " all day"),
    ("", "No"),
    ("x ", "y"),
    ("Is it?", "a"),
    ("Is it?", "b"),
    ("Is it?", "c"),
]


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def harness(model, **given):
    return HarnessModel(model, byte_tokenizer(), **given)


def original(model, **given):
    """The harness's own, which warns that it is given a model."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return HFLM(pretrained=model, tokenizer=byte_tokenizer(), backend="causal", **given)


def most_likely(model):
    """A context and the letter that the model would say after it."""
    with torch.no_grad():
        said = {a: model(torch.tensor([[256, *a.encode()]])).logits[0, -1].argmax().item() for a in map(chr, range(33, 127))}
    return next((context, chr(best)) for context, best in said.items() if 33 <= best < 127)


def by_hand(model, context: str, continuation: str):
    """One unpadded pass over document token, context and continuation; a space at the end of the context goes with the continuation."""
    bare = context.rstrip()
    context, continuation = bare, context[len(bare) :] + continuation
    ids = [256, *context.encode(), *continuation.encode()]
    with torch.no_grad():
        scored = model(torch.tensor([ids])).logits[0, -len(continuation) - 1 : -1].double().log_softmax(-1)
    targets = torch.tensor(list(continuation.encode()))
    return scored.gather(1, targets[:, None]).sum().item(), bool((scored.argmax(1) == targets).all())


@MODELS
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full), 8])
def test_likelihoods_are_those_of_a_plain_pass_at_any_batch_size(build, batch_size):
    model = build()
    pairs = [*PAIRS, most_likely(model)]
    found = harness(model, batch_size=batch_size, begin=True).loglikelihood(instances("loglikelihood", pairs))
    for pair, (value, greedy) in zip(pairs, found, strict=True):
        exact, is_best = by_hand(model, *pair)
        assert value == pytest.approx(exact, rel=2e-5), pair
        assert greedy == is_best
    assert found[-1][1] and not found[0][1]


@MODELS
def test_padding_is_masked_and_logits_are_formed_only_where_something_is_scored(build):
    model, calls = build(), []
    model.register_forward_hook(lambda m, args, kwargs, out: calls.append((args[0], kwargs, out.logits.shape)), with_kwargs=True)
    harness(model, batch_size=8, begin=False).loglikelihood(instances("loglikelihood", PAIRS[:3]))
    (ids, kwargs, shape), *more = calls
    assert not more
    whole = sorted((len(a) + len(b) - 1 for a, b in PAIRS[:3]), reverse=True)
    assert kwargs["attention_mask"].sum(1).tolist() == whole and ids.shape == (3, whole[0])
    places = {at for a, b in PAIRS[:3] for at in range(len(a) - 1, len(a) + len(b) - 1)}
    assert shape[1] == len(places) < ids.shape[1]


def test_answers_of_one_token_share_a_pass():
    model, rows = kla_ccq(), []
    model.register_forward_hook(lambda m, args, out: rows.append(len(args[0])))
    harness(model).loglikelihood(instances("loglikelihood", PAIRS[5:]))
    assert rows == [1]


@pytest.mark.parametrize("build", [pytest.param(kla_ccq, marks=pytest.mark.full), llama])
def test_it_says_what_the_harness_says_where_that_is_right(build):
    """Without document tokens and padding, and within the window, the harness's own loop is a second opinion."""
    model = build()
    pairs = [pair for pair in PAIRS if pair[0]]
    ours = harness(model, begin=False).loglikelihood(instances("loglikelihood", pairs))
    theirs = original(model, max_length=500).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=2e-5)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    texts = [(" ".join(SENTENCES),), (SENTENCES[0],), ("a",), ("",)]
    for length in (16, 500):
        ours = harness(model, max_length=length).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
        theirs = original(model, max_length=length).loglikelihood_rolling(instances("loglikelihood_rolling", texts[:3]), disable_tqdm=True)
        assert ours[:3] == pytest.approx(theirs, rel=2e-5) and ours[3] == 0


def test_a_text_without_a_limit_is_one_window_read_in_chunks(monkeypatch):
    model, text = kla_ccq(), " ".join(SENTENCES)
    with torch.no_grad():
        ids = torch.tensor([[256, *text.encode()]])
        whole = -F.cross_entropy(model(ids[:, :-1]).logits[0].double(), ids[0, 1:], reduction="sum").item()
    widths = []
    model.register_forward_hook(lambda m, args, kwargs, out: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    monkeypatch.setattr("fastweights.evaluate.harness.model.CHUNK", 64)
    (value,) = harness(model).loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    assert value == pytest.approx(whole, rel=2e-5) and max(widths) == 64 and sum(widths) == len(text)


def test_the_length_is_never_silently_2048():
    assert original(kla_ccq()).max_length == 2048  # what the harness would take for a model without a limit
    assert harness(kla_ccq()).limit is None and harness(kla_ccq()).max_length == NO_LIMIT
    assert harness(llama()).limit == 512 and harness(llama(), max_length=99).limit == 99
    lm = harness(llama(), max_length=8)
    lm.loglikelihood(instances("loglikelihood", [("0123456789", "ab"), ("0", "1")]))
    assert lm.truncated == 1
    with pytest.raises(ValueError, match="max_length=8 is shorter than an answer of 9 tokens"):
        lm.loglikelihood(instances("loglikelihood", [("0", "123456789")]))


def test_the_document_token_stands_before_every_text_of_a_model_trained_so():
    assert harness(kla_ccq()).tok_encode("ab") == [256, 97, 98] and harness(llama()).tok_encode("ab") == [97, 98]
    assert harness(llama(), begin=True).tok_encode("ab") == [256, 97, 98] and harness(kla_ccq(), begin=False).tok_encode("ab") == [97, 98]
    assert harness(kla_ccq()).tok_encode("<|document|>ab") == [256, 97, 98]  # not twice
    assert harness(kla_ccq()).tok_encode("ab", add_special_tokens=False) == [97, 98]


def test_a_long_prompt_is_cut_by_hand():
    lm = harness(kla_ccq(), begin=False)
    lm.cut = "middle"
    ids, mask = lm.tok_batch_encode(["abcdefghij", "abc"], left_truncate_len=5)
    assert ids.tolist() == [list(b"abhij"), [257, 257, *b"abc"]]  # two on the left, three on the right, seven are gone
    assert mask.tolist() == [[1] * 5, [0, 0, 1, 1, 1]] and lm.truncated == 1
    lm.cut = "left"
    assert lm.tok_batch_encode(["abcdefghij"], left_truncate_len=5)[0].tolist() == [list(b"fghij")]


def test_room_for_the_answer_is_left_and_the_middle_goes(monkeypatch):
    model = kla_ccq()
    lm, seen = harness(model, max_length=20, begin=False), []
    lm.cut = "middle"
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: seen.append(given["input_ids"]) or generate(**given))
    lm.generate_until(instances("generate_until", [("abcdefghijklmnopqrstuvwxyz", {"until": [], "max_gen_toks": 8})]))
    assert bytes(seen[0][0].tolist()) == b"abcdefuvwxyz" and lm.truncated == 1


@MODELS
def test_padded_generation_is_that_of_each_prompt_alone(build):
    model = build()
    prompts = ["a", "The miller carried the sacks", "Is it?"]
    asked = instances("generate_until", [(prompt, {"until": ["\n\n\n"], "max_gen_toks": 12, "do_sample": False}) for prompt in prompts])
    found = [harness(model, batch_size=size, begin=True).generate_until(asked) for size in (1, 8)]
    alone = []
    for prompt in prompts:
        ids = torch.tensor([[256, *prompt.encode()]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=257)
        alone.append(byte_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n\n")[0])
    assert found[0] == found[1] == alone and len(set(alone)) == 3


def test_progress_is_told():
    lm, told = harness(kla_ccq(), batch_size=2), []
    lm.on_progress = lambda done, total: told.append((done, total))
    lm.loglikelihood(instances("loglikelihood", PAIRS))
    assert told[-1] == (8, 8) and len(told) > 2
    lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("ab",), ("cd",)]))
    assert told[-2:] == [(1, 2), (2, 2)]
    lm.generate_until(instances("generate_until", [(p, {"until": [], "max_gen_toks": 2}) for p in ("a", "b", "c")]))
    assert told[-2:] == [(2, 3), (3, 3)]
