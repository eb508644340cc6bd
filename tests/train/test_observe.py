import math

import pytest
import torch
from torch import nn

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train.observe import first_window, observe

SHAPE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "expand_k": 1.0,
    "expand_v": 1.0,
    "intermediate_size": 32,
}


def model(mixer, **options):
    return FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, **SHAPE, **options))


@pytest.fixture
def row(corpus):
    from fastweights.train.packing import PackedBatches

    return PackedBatches(corpus, sequence_length=16, windows=3, count=1)[0]


def test_the_first_window_is_a_packed_row_of_its_own(row):
    window = first_window(row, 16)
    assert window["input_ids"].tolist() == row["input_ids"][:, :16].tolist()
    assert window["cu_seqlens"][0] == 0 and window["cu_seqlens"][-1] == 16
    assert set(window["cu_seqlens"].tolist()) == {bound for bound in row["cu_seqlens"].tolist() if bound <= 16}


def test_constant_gates_are_seen_as_they_are(row):
    """η = σ(1), Δ = 0.5 with A = 2 so that a = exp(−1), λ = 0.25 from its first bias; layer 1 has another η."""
    kla = model("kla+ccq", ccq_lambda_init=0.25)
    for layer, bias in zip(kla.model.layers, (1.0, -1.0), strict=True):
        write = layer.mixer.write
        for part in (write.eta_proj.weight, write.decay.proj.weight):
            nn.init.zeros_(part)
        nn.init.constant_(write.eta_proj.bias, bias)
        nn.init.constant_(write.decay.A_log, math.log(2))
        nn.init.constant_(write.decay.dt_bias, math.log(math.expm1(0.5)))
    seen = observe(kla, first_window(row, 16))
    for layer, bias in (("layer00", 1.0), ("layer01", -1.0)):
        for what in ("mean", "min", "max"):
            assert seen[f"{layer}/beta_{what}"] == pytest.approx(1 / (1 + math.exp(-bias)), rel=1e-6)
            assert seen[f"{layer}/decay_{what}"] == pytest.approx(math.exp(-1), rel=1e-5)
            assert seen[f"{layer}/lambda_{what}"] == pytest.approx(0.25, rel=1e-6)
        assert 0 < seen[f"{layer}/lambda_trace_max"] <= 0.25


def test_what_a_rule_does_not_have_is_left_out(row):
    assert not observe(model("softmax"), first_window(row, 16))
    assert {name.split("/")[1] for name in observe(model("linear"), first_window(row, 16))} == set()
    names = {name.split("/")[1] for name in observe(model("gla"), first_window(row, 16))}
    assert names == {"decay_mean", "decay_min", "decay_max"}


def test_observing_leaves_the_model_as_it_was(row):
    kla = model("kla+ccq").train()
    before = {name: tensor.clone() for name, tensor in kla.state_dict().items()}
    random = torch.get_rng_state()
    observe(kla, first_window(row, 16))
    assert kla.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in kla.state_dict().items())
    assert all(p.grad is None for p in kla.parameters())
    for layer in kla.model.layers:
        assert not layer.mixer.read.watched and not layer.mixer.read._forward_hooks and not layer.mixer.write._forward_hooks


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # of the compiler's own, about this machine
def test_observing_a_compiled_model_compiles_nothing(row):
    from torch._dynamo.utils import counters

    kla = model("kla+ccq").train()
    for layer in kla.model.layers:
        layer.compile(backend="eager", dynamic=True)

    def graphs():
        kla(**row, use_cache=False).loss.backward()
        return counters["stats"]["unique_graphs"]

    row = {name: row[name] for name in ("input_ids", "labels", "cu_seqlens")}
    graphs()
    compiled = graphs()
    seen = observe(kla, first_window(row, 16))
    assert compiled and seen["layer00/lambda_mean"] > 0
    assert graphs() == compiled
