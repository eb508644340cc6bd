"""Saved models whose files are damaged: every command says in a line what is wrong, and with which folder."""

import json
import shutil

import pytest
import torch

from fastweights import cli
from fastweights.recipes.saved import load_saved, saved_config
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "whole"
    tiny_model(mixer="kla+ccq", vocab_size=258, num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy with a file of this content; a dict changes what the file says, None removes it."""

    def damaged(file, content):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if content is None:
            (folder / file).unlink()
        elif isinstance(content, dict):
            (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | content))
        else:
            (folder / file).write_bytes(content)
        return str(folder)

    return damaged


CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
DAMAGES = [
    (CONFIG, {"hidden_size": "wide"}, "hidden_size='wide' is not a whole number"),
    (CONFIG, {"norm_eps": "small"}, "norm_eps='small' is not a number"),
    (CONFIG, {"num_heads": 0}, "num_heads=0 is not positive"),
    (CONFIG, {"mixer": 3}, "mixer=3 is not a word or a list of words"),
    (CONFIG, {"mixer": "kla+cqc"}, "mixer 'kla+cqc' is not write"),
    (CONFIG, {"eta_max": "much"}, "cannot be used"),
    (CONFIG, {"eos_token_id": ["end"]}, "eos_token_id=['end'] is not a whole number or a list of whole numbers or none"),
    (CONFIG, {"dtype": "float12"}, "float12"),
    (CONFIG, {"hidden_size": 10**12}, "cannot be used"),
    (CONFIG, {"num_hidden_layers": 3}, "lack what its configuration asks for: model.layers.1.mixer"),
    (CONFIG, {"vocab_size": 300}, "have in another shape what its configuration asks for: model.embed_tokens.weight"),
    (CONFIG, b"[]", "model_type"),
    (CONFIG, b"{}", "model_type"),
    (CONFIG, b'{"model_type": "fast', "not a valid JSON file"),
    (CONFIG, b"\xff\xfe\x00", "not a valid JSON file"),
    (CONFIG, None, "is not the folder of a saved model: it has no config.json"),
    (CONFIG, b'{"model_type": "llama"}', "holds a model of type 'llama'; this is for models of fastweights"),
    (WEIGHTS, b"hello", "are damaged or do not fit its configuration"),
    (WEIGHTS, None, "no file named model.safetensors"),
    (TOKENIZER, b'{"version": ', "no tokenizer can be loaded"),
    (TOKENIZER, b"[]", "no tokenizer can be loaded"),
    (TOKENIZER, b"{}", "no tokenizer can be loaded"),
    (TOKENIZER, None, "no tokenizer can be loaded"),
    ("tokenizer_config.json", b'{"tokenizer_class": 3}', "no tokenizer can be loaded"),
]


@pytest.mark.parametrize("file, content, told", DAMAGES)
def test_what_is_damaged_is_a_value_error_that_names_the_folder(damaged, file, content, told):
    folder = damaged(file, content)
    with pytest.raises((ValueError, OSError)) as raised:
        load_saved(folder, "cpu")
    assert told in str(raised.value) and folder in str(raised.value)


def test_weights_that_are_cut_are_found_before_they_are_read(whole, damaged):
    content = (whole / WEIGHTS).read_bytes()
    for length in (7, 500, len(content) - 1):
        with pytest.raises(ValueError, match="are damaged"):
            saved_config(damaged(WEIGHTS, content[:length]))


def test_what_is_whole_is_loaded_as_it_was_saved(whole):
    model, tokenizer = load_saved(str(whole), "cpu")
    assert model.dtype == torch.float32 and not model.training and len(tokenizer) == 258
    assert load_saved(str(whole), "cpu", torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("command", ["generate", "inspect", "serve", "bench"])
def test_every_command_says_it_in_a_line(damaged, tmp_path, monkeypatch, capsys, command):
    """`eval` is asked in test_evaluate."""
    monkeypatch.chdir(tmp_path)
    rest = {"generate": ("--prompt", "x"), "inspect": ("some words",), "serve": (), "bench": ("--lengths", "16")}
    for file, content, told in (DAMAGES[0], DAMAGES[10], DAMAGES[17]):
        arguments = (command, *(["prefill"] if command == "bench" else []), damaged(file, content), *rest[command])
        assert cli.main(arguments) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("fastweights: ") and printed.count("\n") == 1 and told in printed, printed
