"""Tokenised documents as one memory-mapped array, cached on disk under a key of their content."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from fastweights.train.documents import SPLITS, Document, SourceFile, read_documents, source_files, split_of
from fastweights.train.tokenizer import byte_tokenizer, document_token_id

FORMAT = 1
"""Raise it when the files of a cache entry change their meaning."""


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids; each begins with the document token."""

    folder: Path
    """The cache entry; another process opens the same corpus with `open_corpus(folder)`."""
    tokens: NDArray
    """Every token of every document, memory-mapped ``[total]``."""
    starts: NDArray[np.int64]
    """Where each document begins in ``tokens`` ``[documents]``."""
    lengths: NDArray[np.int64]
    """Tokens of each document, its document token included ``[documents]``."""
    bytes: NDArray[np.int64]
    """UTF-8 bytes of each document's text ``[documents]``."""
    splits: NDArray[np.int8]
    """Index in `SPLITS` by content hash ``[documents]``."""
    names: Sequence[str]
    key: str
    """A hash of the content and the tokenizer: the same key means the same tokens."""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, document: int) -> NDArray:
        return self.tokens[self.starts[document] : self.starts[document] + self.lengths[document]]

    @cached_property
    def total(self) -> int:
        """Tokens in all."""
        return int(self.lengths.sum())

    def split(self, name: str) -> Corpus:
        """The documents of one split.

        Raises:
            ValueError: an unknown split, or one without a document.
        """
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is not one of {', '.join(SPLITS)}")
        chosen = np.flatnonzero(self.splits == SPLITS.index(name)).tolist()
        if not chosen:
            raise ValueError(
                f"none of the {len(self)} documents falls in the {name} split: give more documents, or a {name} source of its own"
            )
        names = [self.names[i] for i in chosen]
        parts = {part: getattr(self, part)[chosen] for part in ("starts", "lengths", "bytes", "splits")}
        return dataclasses.replace(self, names=names, key=f"{self.key}/{name}", **parts)


def cache_folder() -> Path:
    """`$FASTWEIGHTS_CACHE`, else `fastweights` in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "fastweights")
    return Path(os.environ.get("FASTWEIGHTS_CACHE", default))


def load_corpus(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Corpus:
    """Tokenise the sources, or map what an earlier call left under the same content and tokenizer.

    Args:
        sources: `stdlib`, files and folders, as `source_files` takes them.
        cache: where entries live; default `cache_folder`.
        progress: called with (files done, files in all).

    Raises:
        ValueError, FileNotFoundError: as `source_files` and `read_documents` do.
    """
    files = source_files(sources)
    key = _key(files, tokenizer)
    entry = (cache or cache_folder()) / "corpora" / key
    if not entry.exists():
        _build(entry, _documents(files, progress), tokenizer, of=", ".join(str(file.path) for file in files))
    return open_corpus(entry)


def keep_documents(name: str, documents: Callable[[], Iterable[Document]], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """A cached corpus of documents that are asked for once: `name` and the tokenizer are the key, so it must say what they are."""
    digest = hashlib.sha256(f"{FORMAT}\n{name}\n".encode() + _fingerprint(tokenizer))
    entry = cache_folder() / "corpora" / digest.hexdigest()[:24]
    if not entry.exists():
        _build(entry, documents(), tokenizer, of=name)
    return open_corpus(entry)


def join(corpora: Sequence[Corpus]) -> Corpus:
    """Several as one, in memory."""
    if len(corpora) == 1:
        return corpora[0]
    parts = {part: np.concatenate([getattr(corpus, part) for corpus in corpora]) for part in ("lengths", "bytes", "splits")}
    return Corpus(
        folder=corpora[0].folder,
        tokens=np.concatenate([corpus[i] for corpus in corpora for i in range(len(corpus))]),
        starts=np.cumsum(parts["lengths"]) - parts["lengths"],
        names=[name for corpus in corpora for name in corpus.names],
        key="+".join(corpus.key for corpus in corpora),
        **parts,
    )


def open_corpus(folder: Path) -> Corpus:
    """Map a cache entry, by the `folder` of a corpus that `load_corpus` gave."""
    index = np.load(folder / "index.npz")
    lengths = index["lengths"]
    return Corpus(
        folder=folder,
        tokens=np.memmap(folder / "tokens.bin", dtype=index["dtype"].item(), mode="r"),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        bytes=index["bytes"],
        splits=index["splits"],
        names=json.loads((folder / "names.json").read_text()),
        key=folder.name,
    )


def _key(files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase) -> str:
    digest = hashlib.sha256(f"{FORMAT}\n".encode())
    digest.update(_fingerprint(tokenizer))
    for path, name in files:
        with path.open("rb") as file:
            digest.update(f"{name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


def _documents(files: Sequence[SourceFile], progress: Callable[[int, int], None]) -> Iterator[Document]:
    for done, file in enumerate(files):
        progress(done, len(files))
        yield from read_documents(file)


def _build(entry: Path, documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, *, of: str) -> None:
    """Write a cache entry beside its place and move it there whole, so that a kill leaves none and two builders do not collide."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    begin = np.array([document_token_id(tokenizer)], dtype).tobytes()
    encode = encoder(tokenizer)
    lengths, sizes, splits, names = [], [], [], []
    try:
        with (folder / "tokens.bin").open("wb") as out:
            rest = iter(documents)
            while batch := list(itertools.islice(rest, 256)):
                for (name, text), tokens in zip(batch, encode([text for _, text in batch]), strict=True):
                    out.write(begin)
                    out.write(np.asarray(tokens, dtype).tobytes())
                    lengths.append(1 + len(tokens))
                    sizes.append(len(text))
                    splits.append(SPLITS.index(split_of(text)))
                    names.append(name)
        if not names:
            raise ValueError(f"no document in {of}")
        np.savez(
            folder / "index.npz",
            dtype=np.array(dtype.name),
            lengths=np.array(lengths, np.int64),
            bytes=np.array(sizes, np.int64),
            splits=np.array(splits, np.int8),
        )
        (folder / "names.json").write_text(json.dumps(names))
        try:
            folder.rename(entry)
        except OSError:
            if not entry.exists():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[bytes]], list]:
    """A function from UTF-8 texts to token ids, without special tokens; a special token's name inside a text is just text."""
    if _fingerprint(tokenizer) == _fingerprint(byte_tokenizer()):
        return lambda texts: [np.frombuffer(text, np.uint8) for text in texts]  # the same ids, some hundred times faster

    def encode(texts: list[bytes]) -> list:
        decoded = [text.decode() for text in texts]
        return tokenizer(decoded, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids

    return encode


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> bytes:
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(rules.encode()).digest()
