"""Where text comes from: files, folders, tables and the running Python's own library, all as one stream of named documents."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

STDLIB = "stdlib"
"""The name that stands for the source of the running Python's standard library."""
SPLITS = ("train", "validation", "test")
TABLES = (".parquet", ".jsonl")

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Installed packages, test suites, and two folders of generated tables."""


class Document(NamedTuple):
    """One text, the unit that memory and convolution are reset at."""

    name: str
    text: bytes
    """UTF-8."""


class SourceFile(NamedTuple):
    """A file that documents are read from, and the name under which results speak of it."""

    path: Path
    name: str


def source_files(sources: Sequence[str]) -> list[SourceFile]:
    """Every file behind the sources, in a fixed order.

    A source is `stdlib`, a file, or a folder, which is walked whole but for hidden entries and caches.

    Raises:
        ValueError: no source is given, or one holds no file.
        FileNotFoundError: a path does not exist.
    """
    if not sources:
        raise ValueError("no source of text was given")
    found: list[SourceFile] = []
    for source in sources:
        files = list(_files_of(source))
        if not files:
            raise ValueError(f"no text file under {source!r}")
        found += files
    return found


def read_documents(file: SourceFile) -> Iterator[Document]:
    """The documents of one file: one per row of a parquet (column `text`) or jsonl (key `text`) table, else the whole file as one.

    Raises:
        ValueError: a table without texts, or a file that is not UTF-8.
    """
    if file.path.suffix == ".parquet":
        rows = _parquet_texts(file.path)
    elif file.path.suffix == ".jsonl":
        rows = _jsonl_texts(file.path)
    else:
        text = file.path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{file.path} is not UTF-8 text: {error}") from None
        yield Document(file.name, text)
        return
    for index, text in enumerate(rows):
        yield Document(f"{file.name}:{index}", text)


def split_of(text: bytes) -> str:
    """`train` for 80 % of all texts, `validation` and `test` for 10 % each, by a hash of the content.

    The same text is in the same split on every machine and under every name, so that copies of a file never sit on both sides.
    """
    share = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % 100
    return "train" if share < 80 else "validation" if share < 90 else "test"


def _files_of(source: str) -> Iterator[SourceFile]:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from _walk(root, STDLIB, lambda name: name not in _NOT_THE_LIBRARY, lambda path: path.suffix == ".py")
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _walk(path, path.name, lambda name: True, _is_text)
    elif path.exists():
        yield SourceFile(path, path.name)
    else:
        raise FileNotFoundError(f"no file or folder {source!r} (or the word {STDLIB!r}, for the standard library's source)")


def _walk(root: Path, name: str, enter, take) -> Iterator[SourceFile]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if enter(f) and not f.startswith(".") and f != "__pycache__")
        for file in sorted(files):
            path = Path(folder, file)
            if not file.startswith(".") and path.stat().st_size and take(path):
                yield SourceFile(path, f"{name}/{path.relative_to(root).as_posix()}")


def _is_text(path: Path) -> bool:
    if path.suffix in TABLES:
        return True
    try:
        return b"\0" not in (data := path.read_bytes()) and data.decode() is not None
    except UnicodeDecodeError:
        return False


def _parquet_texts(path: Path) -> Iterator[bytes]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(path)
    if "text" not in table.schema_arrow.names:
        raise ValueError(f"{path} has no column 'text'; it has {', '.join(table.schema_arrow.names)}")
    for batch in table.iter_batches(batch_size=256, columns=["text"]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text or "", str):
                raise ValueError(f"{path}: column 'text' holds {type(text).__name__}, not text")
            yield (text or "").encode()


def _jsonl_texts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode())["text"]
                content = b"" if text is None else text.encode()
            except UnicodeError as error:  # which is a ValueError, as JSON's is
                raise ValueError(f"{path}, line {number}: not UTF-8 text: {error}") from None
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{path}, line {number}: not a JSON object with a key 'text' that holds text") from None
            yield content
