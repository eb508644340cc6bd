"""The loss and its divisor, gradient checkpointing, parameter groups, the Trainer, and torch.compile."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from fastweights.models import FastWeightsForCausalLM, loss, parameter_groups
from fastweights.models.loss import IGNORE, next_token_targets
from fastweights.models.modeling import CACHE
from fastweights.precision import float32_parameters
from tests.models.test_model_padding import CU_SEQLENS, LENGTHS, documents, padded
from tests.models.tiny import EVERY_KIND, SOME_KINDS, kinds, tiny_config, tiny_model, tokens


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-5, atol=2e-5 * b[name].abs().max().item(), msg=name)


def test_targets():
    labels = torch.tensor([[5, 6, 7, 8, 9, IGNORE, 4, 3]])
    x = IGNORE
    assert next_token_targets(labels).tolist() == [[6, 7, 8, 9, x, 4, 3, x]]
    assert next_token_targets(labels, cu_seqlens=torch.tensor([0, 0, 2, 2, 7, 8])).tolist() == [[6, x, 8, 9, x, 4, x, x]]
    assert next_token_targets(labels, torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])).tolist() == [[x, 7, x, x, x, 4, 3, x]]
    assert next_token_targets(labels[:, 4:], torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])).tolist() == [[x, 4, x, x]]


def test_the_loss_is_transformers_loss_where_nothing_is_padded():
    model, ids = tiny_model(), tokens(3, 20)
    labels = ids.clone()
    labels[0, 4:9] = labels[2] = IGNORE
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.loss, ForCausalLMLoss(out.logits, labels, 61))
    half = ForCausalLMLoss(out.logits, labels, 61, num_items_in_batch=torch.tensor(100))
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=torch.tensor(100)).loss, half)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=100).loss, half)
    nothing = model(ids, labels=torch.full_like(ids, IGNORE)).loss
    assert nothing == 0 and not any(g.any() for g in gradients(model, nothing).values())
    assert model(ids[:, :0], labels=ids[:, :0]).loss == 0
    assert model(ids[:1, :0], labels=ids[:1, :0], cu_seqlens=torch.tensor([0, 0])).loss == 0


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_the_loss_without_all_logits_is_the_same(chunk, monkeypatch):
    """Values and gradients, at any chunk, packed and padded; and never are there more logits than a chunk has."""
    monkeypatch.setattr(loss, "CHUNK", chunk)
    largest = 0
    linear = F.linear

    def watched(x, weight, bias=None):
        nonlocal largest
        if weight.shape[0] == 61:
            largest = max(largest, x.shape[:-1].numel())
        return linear(x, weight, bias)

    model = tiny_model()
    left, mask = padded(documents(), "left")
    row = torch.cat(documents(), dim=1)
    for arguments in (
        {"input_ids": left, "labels": left, "attention_mask": mask},
        {"input_ids": row, "labels": row, "cu_seqlens": CU_SEQLENS},
    ):
        whole = model(**arguments)
        monkeypatch.setattr(F, "linear", watched)
        part = model(**arguments, logits_to_keep=1)
        torch.testing.assert_close(part.logits, whole.logits[:, -1:])
        torch.testing.assert_close(part.loss, whole.loss)
        assert_same_gradients(gradients(model, part.loss), gradients(model, whole.loss))
        assert largest <= max(chunk, 3)
        with torch.no_grad():
            each = model.token_losses(**{name: value for name, value in arguments.items() if name != "labels"})
        assert torch.equal(
            each != 0, next_token_targets(arguments["labels"], arguments.get("attention_mask"), arguments.get("cu_seqlens")) != IGNORE
        )
        torch.testing.assert_close(each.sum() / (sum(LENGTHS) - len(LENGTHS)), whole.loss.detach())
        monkeypatch.setattr(F, "linear", linear)
        largest = 0


def test_gradients_made_with_the_loss_in_bfloat16_are_as_good_as_autograds():
    """Under autocast, of a mean whose 1/items bfloat16 has not: all gradients would be off alike, which no optimizer averages out."""
    x, head, targets = torch.randn(1, 300, 32), torch.nn.Linear(32, 61, bias=False), torch.randint(61, (1, 300))
    targets[0, ::7] = IGNORE

    def of(form, dtype=torch.float32):
        inputs, layer = x.detach().to(dtype).requires_grad_(), torch.nn.Linear(32, 61, bias=False, dtype=dtype)
        layer.weight.data.copy_(head.weight)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            total = form(inputs, layer) / 257
        return [total, *torch.autograd.grad(total, (inputs, layer.weight))]

    pieces = of(lambda x, layer: loss.summed_losses(x, layer, targets))
    whole = of(lambda x, layer: loss.losses_of_logits(layer(x), targets).sum())
    exact = of(lambda x, layer: loss.losses_of_logits(layer(x), targets).sum(), torch.float64)
    for made, plain, true in zip(pieces, whole, exact, strict=True):
        assert made.dtype == torch.float32
        assert (made - true).norm() <= 1.2 * (plain - true).norm() + 1e-6 * true.norm()
        assert abs((made * true).sum() / true.square().sum() - 1) < 1e-3


def test_gradients_made_with_the_loss_take_what_logits_would_take():
    """A label that is none is an error, float64 is no business of autocast's, and who hooks into the projection is asked."""
    model, ids, called = tiny_model(tie_word_embeddings=False), tokens(2, 9), []
    wrong = ids.clone()
    for label in (-1, 61):
        wrong[0, 4] = label
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(ids, labels=wrong, logits_to_keep=1)
    with torch.autocast("cpu", torch.bfloat16):
        whole, pieces = (model.double()(ids, labels=ids, logits_to_keep=keep).loss for keep in (0, 1))
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=0)
    model.float().lm_head.register_full_backward_hook(lambda *_: called.append("backward"))
    model(ids, labels=ids, logits_to_keep=1).loss.backward()
    assert called == ["backward"]


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_what_is_frozen_costs_no_gradient(frozen, monkeypatch):
    model, ids = tiny_model(tie_word_embeddings=False), tokens(2, 9)
    model.get_submodule(frozen).requires_grad_(False)
    monkeypatch.setattr(model, "loss_and_gradients", lambda *_: pytest.fail("both gradients were made"))
    whole, pieces = (gradients(model, model(ids, labels=ids, logits_to_keep=keep).loss) for keep in (0, 1))
    assert_same_gradients(pieces, whole)


@torch.no_grad()
def test_logits_to_keep():
    model, ids = tiny_model(), tokens(2, 9)
    logits = model(ids).logits
    for keep, where in ((3, slice(-3, None)), (30, slice(None)), (torch.tensor([0, 7]), [0, 7])):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, logits[:, where])


@torch.no_grad()
def test_token_losses_through_a_cache():
    model, ids = tiny_model(), tokens(1, 20)
    cache = model(ids[:, :8])[CACHE]
    torch.testing.assert_close(model.token_losses(ids[:, 8:], cache=cache), model.token_losses(ids)[:, 8:])


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_micro_batches_of_uneven_lengths_add_up(kind):
    model = tiny_model(**SOME_KINDS[kind])
    ids, mask = padded(documents(), "right")
    together = gradients(model, model(ids, labels=ids, attention_mask=mask).loss)
    items = torch.tensor(sum(LENGTHS) - len(LENGTHS))
    apart = torch.stack([model(d, labels=d, num_items_in_batch=items).loss for d in documents()]).sum()
    assert_same_gradients(gradients(model, apart), together)


def trainer(tmp_path, rows, **arguments):
    """Three optimiser steps of plain SGD on the same rows, in the order given."""
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(tiny_config())

    def collate(batch):
        ids, mask = padded(batch, "right")
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORE)}

    defaults = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    quiet = {
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(tmp_path), remove_unused_columns=False, **defaults, **quiet, **arguments)
    run = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
    run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    assert run.model_accepts_loss_kwargs
    run.train()
    return model


def test_the_trainer_accumulates_uneven_micro_batches_rightly(tmp_path):
    rows = [tokens(1, n, seed=n) for n in (3, 17, 9, 30, 2, 5, 11, 40, 6, 8, 25, 4)]
    together = trainer(tmp_path, rows, per_device_train_batch_size=4)
    apart = trainer(tmp_path, rows, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"  # its older name
    checkpointed = trainer(tmp_path, rows, per_device_train_batch_size=2, gradient_accumulation_steps=2, **{checkpointing: True})
    start = FastWeightsForCausalLM(tiny_config()).state_dict()
    for name, parameter in together.named_parameters():
        for other in (apart, checkpointed):
            torch.testing.assert_close(other.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    assert any((together.get_parameter(n) - p).abs().max() > 1e-2 for n, p in start.items() if n in dict(together.named_parameters()))


@pytest.mark.parametrize("kind", kinds())
def test_gradient_checkpointing_changes_nothing(kind):
    model, ids = tiny_model(**EVERY_KIND[kind]).train(), tokens(1, 20)
    plain = gradients(model, model(ids, labels=ids, cu_seqlens=CU_SEQLENS).loss)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    calls = []
    for layer in model.model.layers:
        layer.mixer_norm.register_forward_hook(lambda *_: calls.append(1))
    checkpointed = gradients(model, model(ids, labels=ids, cu_seqlens=CU_SEQLENS).loss)
    assert len(calls) == 2 * len(model.model.layers), "each block runs again in the backward pass"
    assert all(torch.equal(a, b) for a, b in zip(plain.values(), checkpointed.values(), strict=True))


@pytest.mark.parametrize("kind", kinds())
def test_parameter_groups(kind):
    model = tiny_model(**EVERY_KIND[kind])
    model.model.norm.weight.requires_grad_(False)
    decayed, undecayed = parameter_groups(model, weight_decay=0.3)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    names = decayed["param_names"] + undecayed["param_names"]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len({id(p) for p in decayed["params"] + undecayed["params"]}) == len(names)
    assert all(
        model.get_parameter(n) is p for group in (decayed, undecayed) for n, p in zip(group["param_names"], group["params"], strict=True)
    )
    gates = {name for name, _ in float32_parameters(model)} - {"model.norm.weight"}
    assert gates == set(undecayed["param_names"]), "all that acts in float32, and nothing else, is left alone by weight decay"
    assert all(p.dim() >= 2 for p in decayed["params"]) and "model.embed_tokens.weight" in decayed["param_names"]
    torch.optim.AdamW([decayed, undecayed], lr=1e-3)


@pytest.mark.parametrize("kind", kinds())
def test_every_parameter_gets_a_gradient(kind):
    model, ids = tiny_model(**EVERY_KIND[kind]), tokens(2, 20)
    found = gradients(model, model(ids, labels=ids).loss)
    assert found.keys() == dict(model.named_parameters()).keys() and all(g.isfinite().all() and g.any() for g in found.values())


def test_it_learns():
    """Copying four tokens is learned in a few steps, and the trained model says so in generate()."""
    model = FastWeightsForCausalLM(tiny_config(mixer="kla", initializer_range=0.05, num_hidden_layers=1)).train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-2)
    pattern = torch.tensor([[7, 21, 3, 40]]).repeat(4, 6)
    for _ in range(40):
        value = model(pattern, labels=pattern).loss
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert value < 0.2
    out = model.eval().generate(
        pattern[:1, :4], attention_mask=torch.ones(1, 4, dtype=torch.long), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert torch.equal(out, pattern[:1, :12])


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "aot_eager") for kind in ("kla+ccq", "gla+raw", "softmax")),
        pytest.param("hybrid", "inductor", marks=pytest.mark.full),
        *(pytest.param(kind, "aot_eager", marks=pytest.mark.full) for kind in EVERY_KIND),
    ],
)
def test_compiled_without_graph_breaks(kind, backend):
    model, ids = tiny_model(**EVERY_KIND[kind]).train(), tokens(2, 40)
    eager = model(ids, labels=ids).loss
    expected = gradients(model, eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    value = compiled(ids, labels=ids).loss
    torch.testing.assert_close(value, eager)
    assert_same_gradients(gradients(model, value), expected)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # of the compiler's own, about this machine
def test_softmax_is_compiled_once_for_any_documents():
    """Their number and lengths differ from batch to batch: what depends on them is left out of the graphs."""
    from torch._dynamo.utils import counters

    model = tiny_model(mixer="softmax").train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    ids, made = tokens(1, 40), []
    for bounds in ([0, 3, 40], [0, 10, 12, 12, 40], [0, 20, 40], [0, *range(4, 40), 40]):  # one alone would be a case of its own
        cu_seqlens = torch.tensor(bounds)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        value = model(ids, labels=ids, cu_seqlens=cu_seqlens).loss
        found = gradients(model, value)
        made.append(counters["stats"]["unique_graphs"])
        with torch.compiler.set_stance("force_eager"):
            eager = model(ids, labels=ids, cu_seqlens=cu_seqlens).loss
            assert_same_gradients(found, gradients(model, eager))
        torch.testing.assert_close(value, eager)
    assert made[0] and made[-1] == made[1], made
