from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fastweights.train.corpus import encoder
from fastweights.train.tokenizer import byte_tokenizer, document_token_id, load_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text())
def test_the_id_of_a_byte_is_its_value_and_text_survives(text):
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert bytes(ids) == text.encode()
    assert TOKENIZER.decode(ids) == text


@given(st.text())
def test_the_fast_way_of_the_corpus_gives_the_same_ids(text):
    assert encoder(TOKENIZER)([text.encode()])[0].tolist() == TOKENIZER(text, split_special_tokens=True).input_ids


def test_special_tokens():
    assert len(TOKENIZER) == 258
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (256, 256, 257)
    assert document_token_id(TOKENIZER) == 256
    assert 256 not in encoder(TOKENIZER)([b"a <|document|> in the text is just text"])[0]


def test_bytes_that_are_no_text_decode_to_the_replacement_character():
    assert TOKENIZER.decode([0xC3, ord("a")]) == "\ufffda"


def test_a_saved_tokenizer_loads_anywhere(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded("héλ").input_ids == list("héλ".encode())
        assert (loaded.eos_token_id, loaded.pad_token_id) == (256, 257)
