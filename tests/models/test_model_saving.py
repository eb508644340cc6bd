"""Saving and loading bit for bit, low precision, the meta device; and folders that load where fastweights was not imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from fastweights.models import FastWeightsForCausalLM, FastWeightsModel
from fastweights.precision import float32_parameters
from tests.models.tiny import EVERY_KIND, SOME_KINDS, kinds, tiny_config, tiny_model, tokens

ROOT = Path(__file__).parents[2]
FILES = {"config.json", "generation_config.json", "model.safetensors", "fastweights_shim.py"}


def float32_names(model):
    return {name for name, _ in float32_parameters(model)}


def assert_finite(model):
    assert all(p.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model(tokens(2, 70)).logits.isfinite().all()


@pytest.mark.parametrize("kind", kinds())
@torch.no_grad()
def test_saving_and_loading_is_bit_equal(kind, tmp_path):
    model, ids = tiny_model(**EVERY_KIND[kind]), tokens(2, 12)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FastWeightsForCausalLM and loaded.config == model.config
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is FastWeightsModel and torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("kind", kinds())
def test_gates_and_norms_stay_float32_in_bfloat16(kind, tmp_path):
    """Built in bfloat16, cast to it, loaded in it: the same float32 bits each time, finite, and the rest in bfloat16."""
    model = tiny_model(**EVERY_KIND[kind])
    gates = float32_names(model)
    assert {name for name in gates if name.endswith("norm.weight")} and all(
        name in gates for name, p in model.named_parameters() if p.dim() == 1
    )
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = tiny_model(dtype=torch.bfloat16, **EVERY_KIND[kind])
    built = AutoModelForCausalLM.from_config(tiny_config(**EVERY_KIND[kind]), dtype=torch.bfloat16)
    reference = model.state_dict()
    for low in (loaded, cast, built):
        assert_finite(low)
        assert low.dtype == torch.bfloat16 and float32_names(low) == gates
        for name, parameter in low.named_parameters():
            assert parameter.dtype == (torch.float32 if name in gates else torch.bfloat16), name
            if low is not built:
                assert torch.equal(parameter, reference[name].to(parameter.dtype)), name
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(loaded.state_dict().values(), again.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("kind", SOME_KINDS)
@torch.no_grad()
def test_bfloat16_and_autocast_are_close_to_float32(kind):
    model, ids = tiny_model(**SOME_KINDS[kind]), tokens(2, 40)
    exact = model(ids).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = model(ids).logits
    low = tiny_model(dtype=torch.bfloat16, **SOME_KINDS[kind])
    for logits in (autocast, low(ids).logits):
        assert ((logits.float() - exact).square().mean() / exact.square().mean()).sqrt() < 0.1
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    assert low.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (2, 44)


@pytest.mark.parametrize("kind", kinds())
def test_from_the_meta_device(kind):
    """Materialised and initialised afterwards, a model has the first weights that a model built at once is given."""
    config = tiny_config(**EVERY_KIND[kind], tie_word_embeddings=False)
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config).eval()
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.constant_(p, float("nan"))
    direct = FastWeightsForCausalLM(config)
    direct.apply(lambda module: setattr(module, "_is_hf_initialized", False))
    for materialised in (model, direct):
        torch.manual_seed(0)
        materialised.init_weights()
    assert_finite(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), direct.state_dict().values(), strict=True))


def test_first_weights():
    for mixer in ("kla+ccq", "softmax"):
        check_first_weights(mixer, 0.02)
        check_first_weights(mixer, 0.002, out_proj_init=0.1)
        assert not tiny_model(mixer=mixer, out_proj_init=0.0).model.layers[0].mixer.out_proj.weight.any()


def check_first_weights(mixer: str, last: float, **options) -> None:
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=8, vocab_size=500)
    model = FastWeightsForCausalLM(tiny_config(mixer=mixer, initializer_range=0.02, **shape, **options))
    block = model.model.layers[3]
    for weight, std in (
        (model.model.embed_tokens.weight, 0.02),
        (block.mixer.qkv_proj.weight, 0.02),
        (block.mixer.out_proj.weight, last),
        (block.mlp.up_proj.weight, 0.02),
        (block.mlp.down_proj.weight, 0.02 / 4),
    ):
        assert abs(weight.std() / std - 1) < 0.05 and abs(weight.mean()) < 0.1 * std
    if mixer != "softmax":
        decay = block.mixer.write.decay
        assert decay.A_log.exp().max() <= 16 and not block.mixer.write.eta_proj.bias.any()
        assert not block.mixer.read.lambda_weight.any() and block.mixer.read.lambda_bias.sigmoid().allclose(torch.tensor(0.5))


def test_missing_weights_are_initialised_and_the_others_are_left_alone(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = {
        name for name in weights if "layers.1.mixer" in name and name.endswith(("A_log", "lambda_bias", "down_proj.weight", "conv.weight"))
    }
    assert len(missing) == 3
    save_file({name: w for name, w in weights.items() if name not in missing}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = FastWeightsForCausalLM.from_pretrained(tmp_path)
    assert_finite(loaded)
    for name, parameter in loaded.named_parameters():
        assert name in missing or torch.equal(parameter, weights[name]), name
    assert torch.equal(loaded.model.layers[1].mixer.read.lambda_bias, torch.zeros(2))


def test_resizing_the_vocabulary():
    model = tiny_model()
    model.resize_token_embeddings(70)
    assert model(tokens(1, 4)).logits.shape == (1, 4, 70) and model.config.vocab_size == 70


LOAD = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
assert "fastweights" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
assert type(model).__module__ == "fastweights.models.modeling", type(model)
model.save_pretrained(FOLDER + "/again")
"""
FIRST = """
import sys, fastweights
assert "transformers" not in sys.modules and "torch" not in sys.modules
from transformers import AutoConfig
assert type(AutoConfig.from_pretrained(FOLDER)).__name__ == "FastWeightsConfig"
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(FOLDER)
assert not [finder for finder in sys.meta_path if "fastweights" in type(finder).__module__]
"""
LAST = """
from transformers import AutoConfig, AutoModelForCausalLM
import fastweights
AutoModelForCausalLM.from_pretrained(FOLDER)
"""
INSIDE = """
import fastweights
from transformers import LlamaModel, Trainer, pipeline
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(FOLDER)
"""
ABSENT = """
import sys
from transformers import AutoModelForCausalLM
class Absent:
    def find_spec(name, *_):
        if name == "fastweights":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent)
try:
    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
except ImportError as error:
    assert "pip install fastweights" in str(error), error
else:
    raise AssertionError("loaded without fastweights")
"""


def elsewhere(folder, script):
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    code = f"FOLDER = {str(folder)!r}\n{script}"
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, script + run.stderr


@pytest.mark.full
def test_folders_load_where_nobody_imported_us(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    elsewhere(tmp_path, LOAD)
    again = tmp_path / "again"
    assert {path.name for path in again.iterdir()} == FILES, "our source files are not copied"
    assert json.loads((again / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"] == "fastweights_shim.FastWeightsForCausalLM"


@pytest.mark.parametrize("script", [FIRST, *(pytest.param(script, marks=pytest.mark.full) for script in (LAST, INSIDE, ABSENT))])
def test_folders_load_in_any_order_of_imports(script, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    elsewhere(tmp_path, script)
