import json
import queue
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.assets import byte_model_path

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(byte_model_path()).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(byte_model_path())


def test_it_is_small_and_nothing_is_loaded_to_find_it():
    files = [file for file in byte_model_path().iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 2_000_000
    code = "import sys, fastweights.assets as assets; assets.byte_model_path(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_kla_with_ccq_and_scores_what_its_card_says(model, tokenizer):
    """The card's number is the result's; a module's source takes few bits a byte, and the same letters in disorder many."""
    row = json.loads((byte_model_path() / "result.json").read_text())
    card = (byte_model_path() / "README.md").read_text()
    assert model.config.mixer == "kla+ccq" == row["mixer"]
    assert sum(p.numel() for p in model.parameters()) == row["parameters"]
    assert f"{row['validation']['bits_per_byte']['value']:.3f}" in card and row["commit"] in card
    text = Path(queue.__file__).read_text()[:4000]
    in_disorder = "".join(text[i] for i in torch.randperm(len(text)).tolist())
    bits = []
    for words in (text, in_disorder):
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(words).input_ids]])
        with torch.no_grad():
            bits.append(model(ids, labels=ids).loss.item() / 0.6931)
    assert bits[0] < 2.5 and bits[1] > bits[0] + 3


def test_it_writes_python(model, tokenizer):
    ids = tokenizer("if __name__ == ", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0]) == "if __name__ == '__main__':\n"


def test_it_is_packaged():
    files = {file.name for file in byte_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "fastweights_shim.py"} <= files
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fastweights"]
    assert "assets/byte_model/*" in data


@pytest.mark.full
def test_a_wheel_has_it(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"fastweights/assets/byte_model/{file.name}" for file in byte_model_path().iterdir()} <= names
