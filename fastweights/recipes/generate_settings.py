"""What can be set about writing on with a saved model. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(kw_only=True, frozen=True)
class GenerateSettings:
    """What to read, what to write, and how."""

    prompt: str | None = None
    """The text to go on from. Without one (and without a file to remember and save) a conversation begins: each line is read after all
    that was said, Ctrl-C ends an answer, Ctrl-D the conversation."""
    prompt_file: Path | None = None
    """A file that holds the prompt."""
    remember: Path | None = None
    """A file to read first; its length costs time and no memory."""
    load: Path | None = None
    """A snapshot to begin from, as `--save` writes it."""
    save: Path | None = None
    """Where to write a snapshot of all that was read and written."""
    max_new_tokens: int = 256
    """An answer's length in tokens, at most."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token every time."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that make up a probability of p together."""
    min_p: float = 0.0
    """Only tokens at least min_p times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Logits of tokens that stood before are divided by it where positive, else multiplied."""
    seed: int | None = None
    """The same seed draws the same tokens; one is drawn if it is not given."""
    stop: tuple[str, ...] = ()
    """An answer ends before the first of these strings."""
    ignore_eos: bool = False
    """Go on after the end-of-text token."""
    speculate: int = 0
    """Guess up to so many tokens at a time from earlier text and check them in one pass; exact, for greedy decoding."""
    prefill_chunk: int | None = None
    """Tokens read at a time; by default 512, on a GPU 16384."""
    compile: bool = False
    """Compile the model first (torch.compile): a wait of a minute on a GPU the first time, then several times as fast."""
    max_context: int | None = None
    """Tokens to make room for in models with full softmax layers; 16384 by default there."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the weights; `auto` keeps what the folder holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""

    @property
    def interactive(self) -> bool:
        return self.prompt is None and self.prompt_file is None and not (self.remember and self.save)
