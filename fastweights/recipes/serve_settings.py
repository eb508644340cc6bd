"""What can be set about serving a saved model. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CHAT_TEMPLATE = "{{ bos_token or eos_token }}{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""For models that were trained on plain text and know no roles: the document token, as before every text of training, then what was said,
a line each. The model goes on from there, as in `fastweights generate`."""


@dataclass(kw_only=True, frozen=True)
class ServeSettings:
    """Where to listen, and what the model is loaded as.

    Raises:
        ValueError: from the constructor, for a port that is none.
    """

    host: str = "localhost"
    """Address to listen on; 0.0.0.0 for all of this machine's. There is no password: whoever reaches it may ask."""
    port: int = 8000
    """Port to listen on."""
    chat_template: Path | None = None
    """A file with a Jinja template that lays out a conversation. By default the tokenizer's own, and if it has none, a plain one: what was
    said, a line each, from which the model goes on."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the weights; `auto` keeps what the folder holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65_535:
            raise ValueError(f"port={self.port} is not from 1 to 65535")
