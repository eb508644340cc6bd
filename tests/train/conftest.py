import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.train.corpus import load_corpus
from fastweights.train.tokenizer import byte_tokenizer


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Eleven documents of 3 to 102 bytes: many borders inside windows, windows over several documents, and an empty text at the end."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"{i}: " + "abcdefghij"[i] * 11 * i)
    (folder / "rows.jsonl").write_text('{"text": ""}\n')
    return folder


@pytest.fixture
def corpus(texts, tmp_path):
    return load_corpus([str(texts)], byte_tokenizer(), cache=tmp_path / "cache")


@pytest.fixture
def llama():
    """Anything that transformers calls a causal language model can be trained; this is the smallest."""

    def build():
        torch.manual_seed(0)
        shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        return LlamaForCausalLM(LlamaConfig(vocab_size=258, **shape, bos_token_id=256, eos_token_id=256, pad_token_id=257))

    return build
