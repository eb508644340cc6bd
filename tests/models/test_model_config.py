"""A configuration is checked when it is built, survives saving, and has no field without effect."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from fastweights.layers import mixer_options
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.modeling import CACHE
from fastweights.write import WRITE_RULES
from tests.models.tiny import ALL_RULES, EVERY_KIND, kinds, tiny_config, tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "klaa"}, "klaa.*kla.*raw, ccq"),
        ({"mixer": "kla+qcc"}, r"kla\+qcc"),
        ({"mixer": ["kla"]}, "lists 1 layers and num_hidden_layers is 2"),
        ({"mixer": []}, "lists 0 layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"intermediate_size": -1}, "intermediate_size=-1"),
        ({"eta_maximum": 2}, r"no field or option 'eta_maximum'.*options of its rules: relaxation.*ccq_forget.*fields: mixer"),
        ({"mixer": "gla", "eta_max": 2.0}, "no field or option 'eta_max' with mixer='gla'; options of its rules: none"),
        ({"mixer": "kla", "ccq_forget": "memory"}, "no field or option 'ccq_forget'"),
        ({"mixer": "softmax", "eps": 1e-3}, "no field or option 'eps'"),
        ({"mixer": "gla+ccq", "ccq_forget": "memory"}, "needs a decay per head"),
        ({"mixer": ["kla+ccq", "linear+ccq"], "ccq_forget": "memory"}, "write rule 'linear' has none"),
        ({"relaxation": False, "single_gate": True}, "single_gate"),
        ({"eta_max": 3.0}, "eta_max=3.0"),
        ({"window_size": 8}, "window_size=8 is for softmax layers"),
        ({"mixer": "softmax", "window_size": 0}, "window_size=0"),
        ({"expand_k": 0.7}, r"expand_k=0.7 · hidden_size=32 / 2 heads = 11.2 is not a head size"),
        ({"expand_v": 0.0}, "expand_v"),
        ({"expand_v": float("inf")}, r"expand_v=inf · hidden_size=32 / 2 heads = inf is not a head size"),
        ({"expand_k": float("nan")}, "expand_k=nan .* is not a head size"),
        ({"num_value_heads": 0}, "num_value_heads=0 is not positive"),
        ({"num_value_heads": 3}, "num_value_heads=3|expand_v=1.0"),
        ({"conv_size": -1}, "conv_size=-1"),
        ({"backend": "cuda"}, "backend='cuda' is not one of auto, reference, torch, triton"),
        ({"format_version": 2}, "format_version=2.*reads format 1"),
        ({"hidden_size": "wide"}, "hidden_size='wide' is not a whole number$"),
        ({"hidden_size": 32.0}, r"hidden_size=32\.0 is not a whole number$"),
        ({"norm_eps": None}, "norm_eps=None is not a number$"),
        ({"out_proj_init": -0.1}, "out_proj_init=-0.1 is negative; 0 starts the projection at zero"),
        ({"num_heads": 0}, "num_heads=0 is not positive"),
        ({"use_cache": 1}, "use_cache=1 is not true or false$"),
        ({"num_value_heads": True}, "num_value_heads=True is not a whole number or none$"),
        ({"mixer": ["kla", 3]}, r"mixer=\['kla', 3\] is not a word or a list of words$"),
        ({"eos_token_id": "end"}, "eos_token_id='end' is not a whole number or a list of whole numbers or none$"),
    ],
)
def test_impossible_configurations(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**arguments)


def test_the_default_is_the_paper_s_size():
    with torch.device("meta"):
        model = FastWeightsForCausalLM(FastWeightsConfig(mixer="kla"))
    embedding = model.model.embed_tokens.weight.numel()
    assert round(embedding / 1e6) == 49
    assert abs(model.num_parameters() - embedding - 468e6) < 0.01 * 468e6
    mixer = model.model.layers[0].mixer
    assert (mixer.head_k_dim, mixer.head_v_dim, mixer.num_heads) == (96, 192, 12)


@pytest.mark.parametrize("kind", kinds())
def test_a_saved_configuration_is_the_same(kind, tmp_path):
    config = tiny_config(**EVERY_KIND[kind], eos_token_id=3)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is FastWeightsConfig and loaded == config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["format_version"] == 1 and saved["model_type"] == "fastweights"
    for mixer in set(config.mixers) - {"softmax"}:
        assert all(name in saved for name in mixer_options(mixer)), "defaults are written out, so that they may change one day"
    assert FastWeightsConfig(**json.loads(config.to_json_string(use_diff=False))) == config
    assert config != tiny_config(**EVERY_KIND[kind])


def test_configurations_that_differ_in_an_option_differ():
    assert tiny_config(mixer="kla", eta_max=2.0) != tiny_config(mixer="kla") == tiny_config(mixer="kla")


def test_loading_with_changes(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, ccq_strength="learned", attn_implementation="sdpa").ccq_strength == "learned"
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(ValueError, match="format_version=9"):
        AutoConfig.from_pretrained(tmp_path)


def test_the_usual_words():
    config = tiny_config(mixer=("kla", "softmax"))
    assert config.num_attention_heads == 2 and config.mixer == ["kla", "softmax"] == config.mixers
    assert AutoConfig.for_model("fastweights", num_attention_heads=8).num_heads == 8
    assert isinstance(AutoModelForCausalLM.from_config(tiny_config()), FastWeightsForCausalLM)


def traces(config):
    """All that a user can notice: shapes, first weights, outputs, and what generation is told."""
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(config).eval()
    with torch.no_grad():
        out = model(tokens(1, 12))
    generation = {name: getattr(model.generation_config, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return [tuple(p.shape) for p in model.parameters()], out.logits.tolist(), CACHE in out, generation


FIELDS = {
    "mixer": ("gla", {}),
    "vocab_size": (67, {}),
    "hidden_size": (64, {}),
    "num_hidden_layers": (3, {}),
    "num_heads": (4, {}),
    "num_value_heads": (4, {}),
    "expand_k": (1.0, {}),
    "expand_v": (2.0, {}),
    "conv_size": (3, {}),
    "intermediate_size": (32, {}),
    "norm_eps": (1e-2, {}),
    "rope_theta": (100.0, {"mixer": "softmax"}),
    "window_size": (3, {"mixer": "softmax"}),
    "tie_word_embeddings": (False, {}),
    "initializer_range": (0.1, {}),
    "out_proj_init": (0.1, {}),
    "use_cache": (False, {}),
    "pad_token_id": (1, {}),
    "bos_token_id": (1, {}),
    "eos_token_id": (1, {}),
}
OPTIONS = {
    "relaxation": (False, {}),
    "key_norm": ("learned", {}),
    "sequence_factor": ("1/sqrt(t)", {}),
    "q_norm": ("none", {}),
    "single_gate": (True, {}),
    "eta_max": (2.0, {}),
    "eps": (1.0, {}),
    "ccq_forget": ("memory", {}),
    "ccq_lambda_init": (0.9, {}),
    "ccq_strength": ("learned", {}),
    "ccq_unit_keys": (False, {}),
    "ccq_eps": (1.0, {"ccq_unit_keys": True}),
}


def changes():
    """The options of a write rule with the raw read; those of a read with two writes, of bounded and of unbounded keys."""
    for field, (value, context) in FIELDS.items():
        yield pytest.param({field: value}, context, id=field)
    for mixer in (*WRITE_RULES, "kla+ccq", "mamba2+ccq"):
        for option in mixer_options(mixer):
            if "+" in mixer and not option.startswith("ccq_"):
                continue
            value, context = OPTIONS[option]
            if option == "ccq_unit_keys" and mixer == "kla+ccq":  # False is what it is there; and equal ε would give equal keys
                value, context = True, {"eps": 1.0}
            yield pytest.param({option: value}, context | {"mixer": mixer}, id=f"{mixer}-{option}")


@pytest.mark.parametrize(("change", "context"), list(changes()))
def test_every_field_and_option_has_an_effect(change, context):
    assert traces(tiny_config(**context)) != traces(tiny_config(**context | change))


def test_none_of_them_was_forgotten():
    """``backend`` says who computes and ``format_version`` who may load; they have tests of their own."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert {field.name for field in dataclasses.fields(FastWeightsConfig)} - inherited == set(FIELDS) | {"backend", "format_version"}
    assert {name for mixer in ALL_RULES for name in mixer_options(mixer)} == set(OPTIONS)


def test_the_backend_reaches_the_operators(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for mixer in ("kla", "gla"):
        with pytest.raises(ValueError, match="triton"):
            FastWeightsForCausalLM(tiny_config(mixer=mixer, backend="triton"))(tokens(1, 9))
