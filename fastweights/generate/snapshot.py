"""A memory to keep: the state after some text, of one size however long the text was. Saved, loaded, branched from, gone on from.

A snapshot holds the state at the last multiple of the engine's ``prefill_chunk`` tokens, and the tokens after it, which are read whenever
it is gone on from. So whatever follows is computed in the same pieces, and gives the same bits, as if all the text had come at once.
(After an answer the state is where the answer left it.)

The file is safetensors. Its metadata names format, version and model, and a hash covers every byte of content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastweights.generate.prompts import Tokens
from fastweights.layers import mixer_options
from fastweights.layers.softmax import SoftmaxState
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.cache import LayerState
from fastweights.notation import CCQState, MemoryState

FORMAT = "fastweights snapshot"
FORMAT_VERSION = "1"
NOT_THE_MODEL = (
    "attribute_map",
    "keys_to_ignore_at_inference",
    "initializer_range",
    "out_proj_init",
    "backend",
    "use_cache",
    "format_version",
)
"""Annotations of the configuration that change nothing about what a state means; nor does one that ends in ``_token_id``."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    states: tuple[LayerState, ...]
    """One a layer, of one row."""
    read: int
    """Tokens that the states hold."""
    pending: tuple[int, ...]
    """Tokens after them, at least one."""
    seen: Bool[Tensor, " vocabulary"]
    """Which tokens the text has, for the repetition penalty."""
    fingerprint: str
    """Of the model that read it, as `model_fingerprint` gives it."""
    model: str
    """The same for people."""

    def __len__(self) -> int:
        """Tokens of text."""
        return self.read + len(self.pending)

    def check_model(self, model: FastWeightsForCausalLM, fingerprint: str) -> None:
        """ValueError unless ``model``, whose fingerprint is given, has read it."""
        if self.fingerprint != fingerprint:
            raise ValueError(
                f"the snapshot is of another model: found {self.model} ({self.fingerprint[:16]}…), "
                f"expected {describe(model)} ({fingerprint[:16]}…)"
            )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file. It is there whole or not at all: what stood there before stays until the last byte is written."""
        path = Path(path)
        tensors = {name: x.detach().cpu().contiguous() for name, x in _flat(self.states)}
        tensors |= {"pending": torch.tensor(self.pending), "seen": self.seen.cpu()}
        about = {"format": FORMAT, "format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, "model": self.model}
        about["tokens_read"] = str(self.read)
        content = save(tensors, about | {"content": _content_hash(about, tensors)})
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Raises ValueError for a file that is no snapshot, of another format version, or damaged; OSError if it cannot be read."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no snapshot file {str(path)!r}")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"{path} is not a snapshot: its metadata says format={about.get('format')!r}, expected {FORMAT!r}")
                if about.get("format_version") != FORMAT_VERSION:
                    found = about.get("format_version")
                    raise ValueError(f"{path} has snapshot format version {found!r}; this fastweights reads version {FORMAT_VERSION!r}")
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: found {error}; it is damaged, cut short, or no snapshot") from error
        said, found = about.pop("content", "none"), _content_hash(about, tensors)
        if said != found:
            raise ValueError(f"{path} is damaged: its content has the hash {found[:16]}…, and the file says {said[:16]}…")
        pending = tuple(tensors.pop("pending").tolist())
        seen = tensors.pop("seen")
        return cls(_nested(tensors), int(about["tokens_read"]), pending, seen, about["fingerprint"], about["model"])


def seen_tokens(model: FastWeightsForCausalLM, tokens: Tokens, after: Snapshot | None) -> Bool[Tensor, " vocabulary"]:
    """Which tokens there are in ``tokens`` and in the text before them; on the CPU."""
    seen = torch.zeros(model.config.vocab_size, dtype=torch.bool) if after is None else after.seen.clone()
    seen[torch.from_numpy(tokens)] = True
    return seen


def model_fingerprint(model: FastWeightsForCausalLM) -> str:
    """SHA-256 of the configuration, where it matters, and of every weight. Reads all weights once."""
    names = {name for name in FastWeightsConfig.__annotations__ if not name.startswith("_") and not name.endswith("_token_id")}
    for mixer in set(model.config.mixers) - {"softmax"}:
        names |= mixer_options(mixer).keys()
    config = {name: getattr(model.config, name) for name in names - set(NOT_THE_MODEL)}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    _hash_tensors(digest, sorted(model.named_parameters()))
    return digest.hexdigest()


def describe(model: FastWeightsForCausalLM) -> str:
    config = model.config
    return (
        f"{config.num_hidden_layers} layers of {'/'.join(dict.fromkeys(config.mixers))}, width {config.hidden_size}, "
        f"vocabulary {config.vocab_size}, {str(model.dtype).removeprefix('torch.')}"
    )


def _flat(states: Iterable[LayerState]) -> Iterable[tuple[str, Tensor]]:
    for i, state in enumerate(states):
        for field, part in state._asdict().items():
            if isinstance(part, Tensor):
                yield f"{i}.{field}", part
            elif part is not None:
                yield from ((f"{i}.{field}.{name}", x) for name, x in part._asdict().items())


def _nested(tensors: Mapping[str, Tensor]) -> tuple[LayerState, ...]:
    """The inverse of `_flat`."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, x in tensors.items():
        layer, _, field = name.partition(".")
        layers.setdefault(int(layer), {})[field] = x
    states: list[LayerState] = []
    for _, parts in sorted(layers.items()):
        if "keys" in parts:
            states.append(SoftmaxState(**parts))
            continue
        read = {name.removeprefix("read."): parts.pop(name) for name in list(parts) if name.startswith("read.")}
        states.append(MemoryState(parts["memory"], parts.get("conv"), parts["place"], CCQState(**read) if read else None))
    return tuple(states)


def _content_hash(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    _hash_tensors(digest, sorted(tensors.items()))
    return digest.hexdigest()


def _hash_tensors(digest, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, x in named:
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
