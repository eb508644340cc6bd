import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastweights.train.corpus import load_corpus, open_corpus
from fastweights.train.documents import SPLITS, read_documents, source_files, split_of
from fastweights.train.tokenizer import byte_tokenizer


@pytest.fixture
def load(tmp_path):
    return lambda *sources, tokenizer=None: load_corpus(
        [str(source) for source in sources], tokenizer or byte_tokenizer(), cache=tmp_path / "cache"
    )


def texts(corpus):
    return [bytes(corpus[i][1:].tolist()).decode() for i in range(len(corpus))]


def test_every_kind_of_source(tmp_path, load):
    (tmp_path / "tree/deep/.hidden").mkdir(parents=True)
    (tmp_path / "tree/b.py").write_text("code")
    (tmp_path / "tree/deep/a.txt").write_text("prose, λ")
    (tmp_path / "tree/deep/.hidden/c.txt").write_text("not this")
    (tmp_path / "tree/image.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "tree/empty.txt").write_text("")
    table = pyarrow.table({"source": ["x", "y"], "text": ["first row", "second row"]})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "a line", "other": 1}) + "\n\n" + json.dumps({"text": "one more"}) + "\n")

    corpus = load(tmp_path / "tree", tmp_path / "table.parquet", tmp_path / "lines.jsonl", tmp_path / "tree/b.py")
    assert texts(corpus) == ["code", "prose, λ", "first row", "second row", "a line", "one more", "code"]
    assert corpus.names[:4] == ["tree/b.py", "tree/deep/a.txt", "table.parquet:0", "table.parquet:1"]
    assert all(corpus[i][0] == 256 for i in range(len(corpus)))
    assert corpus.bytes.tolist() == [len(text.encode()) for text in texts(corpus)]
    assert corpus.total == len(corpus.tokens) == sum(corpus.bytes) + len(corpus)


def test_the_standard_library_is_a_source_without_its_tests():
    names = [file.name for file in source_files(["stdlib"])]
    assert {"stdlib/tarfile.py", "stdlib/json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "/test" in name or not name.endswith(".py") for name in names)


def test_the_split_is_by_content_and_about_80_10_10(tmp_path, load):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(2000)))
    (tmp_path / "copy.jsonl").write_text(json.dumps({"text": "text 7"}) + "\n")
    corpus = load(tmp_path / "rows.jsonl", tmp_path / "copy.jsonl")
    splits = {name: corpus.split(name) for name in SPLITS}
    assert sum(map(len, splits.values())) == len(corpus)
    assert [len(splits[name]) / 2000 for name in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    assert sum(texts(split).count("text 7") for split in splits.values()) == texts(splits[split_of(b"text 7")]).count("text 7") == 2
    assert len({split.key for split in splits.values()}) == 3


def test_the_cache_is_keyed_by_content_and_tokenizer(tmp_path, load):
    file = tmp_path / "a.txt"
    file.write_text("one two")
    first = load(file)
    index = first.folder / "index.npz"
    written = index.stat().st_mtime_ns
    assert load(file).key == first.key and index.stat().st_mtime_ns == written  # read, not built again
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<s>": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    by_words = load(file, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    assert by_words.key != first.key and by_words[0].tolist() == [2, 0, 1] and by_words.bytes.tolist() == [7]
    file.write_text("one two!")
    assert load(file).key != first.key
    assert texts(open_corpus(first.folder)) == ["one two"]


def test_a_build_that_fails_leaves_nothing(tmp_path, load):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"no": "text"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: not a JSON object with a key 'text'"):
        load(tmp_path / "bad.jsonl")
    for line, told in (
        (b'{"text": 5}', "holds text"),
        (b'{"text": "\\ud800"}', "not UTF-8 text: .*surrogates"),
        (b'{"text": "\xe9"}', "not UTF-8 text"),
    ):
        (tmp_path / "bad.jsonl").write_bytes(b'{"text": null}\n' + line)
        with pytest.raises(ValueError, match=rf"bad\.jsonl, line 2: .*{told}"):
            load(tmp_path / "bad.jsonl")
    assert not any((tmp_path / "cache/corpora").iterdir())


def test_errors_name_what_was_given(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="no file or folder 'nowhere'"):
        load("nowhere")
    with pytest.raises(ValueError, match="no source of text"):
        load()
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="no text file under"):
        load(tmp_path / "bare")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        load(tmp_path / "latin.txt")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no column 'text'; it has body"):
        list(read_documents(source_files([str(tmp_path / "t.parquet")])[0]))
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no document in"):
        load(tmp_path / "none.jsonl")
    (tmp_path / "one.txt").write_text("x")
    one = load(tmp_path / "one.txt")
    with pytest.raises(ValueError, match="split 'dev' is not one of train, validation, test"):
        one.split("dev")
    with pytest.raises(ValueError, match="none of the 1 documents falls in the"):
        [one.split(name) for name in SPLITS]
