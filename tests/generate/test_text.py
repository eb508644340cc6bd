"""Pieces of text are final: together they are what the tokenizer makes of all tokens at once, cut before the first stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastweights.generate.text import WINDOW, TextStream
from fastweights.train.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()


def words_tokenizer():
    """Words with the space in front, which goes at the beginning of a text, and bytes for the rest: as Llama's does."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁quick", "▁fox", "jump", "s", "▁", ".", "é"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def pieces(tokenizer, tokens, stop=(), context=()):
    stream, said = TextStream(tokenizer, stop, context), []
    for token in tokens:
        stream.push([token])
        said.append(stream.pop())
    return [*said, stream.pop(final=True)], stream


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_whole_and_each_character_with_its_last_byte(text):
    said, _ = pieces(BYTES, text.encode())
    assert "".join(said) == text
    assert said[:-1] == ["" if i + 1 < len(c.encode()) else c for c in text for i in range(len(c.encode()))]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_come_as_the_tokenizer_reads_them(content):
    said, _ = pieces(BYTES, content)
    assert "".join(said) == BYTES.decode(list(content))
    assert all(len(piece) <= 80 for piece in said)


@pytest.mark.parametrize("stop", [["END"], ["\n\n", "END", "ab"], ["aba", "bab"], ["é"], ["E"]])
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="aébEND\n", max_size=40))
def test_the_text_ends_before_the_first_stop_string(stop, text):
    said, stream = pieces(BYTES, text.encode(), stop)
    found = [text.index(s) for s in stop if s in text]
    # Of two that overlap, the one whose end comes first has stopped the text.
    ends = [text.index(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(found)
    if found:
        first = min(ends)
        assert "".join(said) == text[: min(text[:first].index(s) for s in stop if s in text[:first])]
    else:
        assert "".join(said) == text


def test_a_stop_string_across_tokens_is_never_shown():
    said, stream = pieces(BYTES, b"one STOP two", ["STOP"])
    assert said[:5] == ["o", "n", "e", " ", ""] and "".join(said) == "one " and stream.stopped
    said, _ = pieces(BYTES, b"one STOR", ["STOP"])
    assert said[4:8] == ["", "", "", "STOR"]


def test_bytes_that_are_no_text_do_not_hold_up_the_rest():
    said, _ = pieces(BYTES, b"a" + b"\xff" * 10 + b"b")
    assert "".join(said) == "a" + "�" * 10 + "b"
    assert said.count("") <= 5


def test_spaces_and_bytes_of_a_tokenizer_with_words():
    words = words_tokenizer()
    the, quick, fox = words.convert_tokens_to_ids(["▁the", "▁quick", "▁fox"])
    euro = words.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "€".encode()])
    said, _ = pieces(words, [the, quick, *euro, fox] * 9)
    assert "".join(said) == words.decode([the, quick, *euro, fox] * 9)
    assert said[:6] == ["the", " quick", "", "", "€", " fox"]
    said, _ = pieces(words, [quick, fox], context=[the])  # in the middle of a text the space stays
    assert said == [" quick", " fox", ""]


def test_the_end_of_text_is_not_text():
    said, _ = pieces(BYTES, [*b"ab", BYTES.eos_token_id])
    assert "".join(said) == "ab"


def test_a_context_that_ends_within_a_character_is_left_alone():
    said, _ = pieces(BYTES, b"\x82\xacx", context=list(b"ab\xe2"))
    assert "".join(said) == BYTES.decode(list(b"\x82\xacx"))


def test_bytes_that_are_no_text_are_not_decoded_again_and_again():
    stream = TextStream(byte_tokenizer())
    for _ in range(200):
        stream.push([255])
        assert len(stream._ids) <= WINDOW
    assert "".join((stream.pop(), stream.pop(final=True))) == "\ufffd" * 200
