"""The byte-level tokenizer: a byte is a token, its value is the token's id. Nothing to download, nothing to train.

It is a plain fast tokenizer of transformers: checkpoints carry it, `AutoTokenizer` loads it, and whatever takes a tokenizer takes it.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fastweights.models.loading import first_line

BYTES = "bytes"
"""The name that stands for `byte_tokenizer` wherever a tokenizer is named."""
DOCUMENT_TOKEN = "<|document|>"
"""Id 256: stands before every document, so that its first byte is predicted too, and ends generation."""
PAD_TOKEN = "<|pad|>"
"""Id 257."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """258 tokens: the 256 bytes by value, then the document token (bos and eos) and the pad token."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([DOCUMENT_TOKEN, PAD_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=DOCUMENT_TOKEN,
        eos_token=DOCUMENT_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """`bytes`, or whatever `AutoTokenizer` finds under a local folder's or a hub's name.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if name == BYTES:
        return byte_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # JSON, tokenizers and transformers each have their own
        raise ValueError(f"no tokenizer can be loaded from {name!r}: {first_line(error)}") from error


def document_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before a document: bos, or eos where a tokenizer has no bos."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to begin documents with")


def _byte_characters() -> list[str]:
    """What the ByteLevel pre-tokenizer writes for each byte: the character itself where printable, else the next one from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
