"""A model in shards over two processes (FSDP2) is the model whole: born the same, gates in float32, a step the same, saved as a folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.models import FastWeightsForCausalLM, parameter_groups
from fastweights.precision import float32_parameters
from fastweights.train.sharding import initialize_
from tests.models.tiny import error
from tests.train.two_processes import born_on_meta, in_processes, loss_of, sharded_steps

pytestmark = pytest.mark.full


def unsharded():
    model = born_on_meta()
    initialize_(model, "cpu", seed=3)
    return model


def gradients(model):
    """Of the mean of both rows' losses."""
    for rank in range(2):
        (loss_of(model.train(), rank) / 2).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """(what each rank saw) of a step in bfloat16, of the same with recomputed activations, and of one in float32; and the saved folder."""
    folder = tmp_path_factory.mktemp("sharded")
    cases = [(torch.bfloat16, False, folder / "model"), (torch.bfloat16, True, None), (torch.float32, False, None)]
    return list(zip(*in_processes(2, sharded_steps, folder, cases), strict=True)), folder / "model"


def test_born_sharded_is_born_whole_bit_for_bit(steps):
    model = unsharded()
    for ranks in steps[0]:
        for rank in ranks:
            assert all(share == 0.5 for share in rank["shares"].values())
            assert rank["decays"] == parameter_groups(model)[0]["param_names"]
            assert rank["weights"].keys() == dict(model.named_parameters()).keys()
            assert all(torch.equal(rank["weights"][name], p) for name, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    decay = model.model.layers[0].mixer.write.decay
    assert decay.A_log.exp().min() > 0 and decay.A_log.exp().max() < 16 and decay.A_log.std() > 0


def test_gates_are_seen_in_float32_and_matrices_in_bfloat16(steps):
    """To the last bit, inside of forward; and a memory that is passed in is not rounded either."""
    model = unsharded()
    gates = {name for name, _ in float32_parameters(model)}
    for rank in steps[0][0]:
        memories = {name: seen for name, seen in rank["seen"].items() if name.endswith(".state")}
        assert memories.keys() >= {f"model.layers.{i}.mixer.state" for i in range(2)}
        for memory in memories.values():
            assert memory.dtype == torch.float32 and not torch.equal(memory.bfloat16().float(), memory)
        assert rank["seen"].keys() - memories.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
        for name in rank["weights"]:
            weight, seen = rank["weights"][name] - rank["gradients"][name], rank["seen"][name]  # hooks saw it last after the step
            assert weight.dtype == torch.float32 and not torch.equal(weight.bfloat16().float(), weight)
            assert seen.dtype == (torch.float32 if name in gates else torch.bfloat16), name
            assert torch.equal(seen, weight.to(seen.dtype)), name


def test_a_step_is_that_of_the_whole_model(steps):
    """Of SGD at rate 1, so its gradients: against float64, at most twice as wrong as the whole model's in that precision, and 8 ulps."""
    exact = gradients(unsharded().double())
    for dtype, ranks in ((torch.bfloat16, steps[0][0]), (torch.float32, steps[0][2])):
        plain = gradients(unsharded().to(dtype))
        for name, truth in exact.items():
            allowed = 2 * error(plain[name], truth) + 8 * torch.finfo(dtype).eps
            assert error(ranks[0]["gradients"][name], truth) <= allowed, name
            assert torch.equal(ranks[0]["gradients"][name], ranks[1]["gradients"][name])


def test_recomputed_activations_change_no_bit(steps):
    for once, again in zip(*steps[0][:2], strict=True):
        assert once["loss"] == again["loss"]
        assert all(torch.equal(gradient, again["gradients"][name]) for name, gradient in once["gradients"].items())


def test_shards_are_saved_as_a_plain_folder(steps):
    """The weights after the step, which rank 0 has gathered."""
    (rank0, rank1), *_ = steps[0]
    assert not rank1["after"]
    model = AutoModelForCausalLM.from_pretrained(steps[1])
    assert type(model) is FastWeightsForCausalLM and model.config.architectures == ["FastWeightsForCausalLM"]
    assert rank0["after"].keys() == model.state_dict().keys()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, rank0["weights"][name] - rank0["gradients"][name]), name
