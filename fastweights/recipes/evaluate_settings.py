"""What can be set about an evaluation. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SUITES = ("ccq-paper", "kla-paper", "offline")


@dataclass(kw_only=True, frozen=True)
class EvalSettings:
    """What to measure of saved models. Each is a folder with a saved model, or a name on the Hugging Face hub.

    Interrupt it as you like: the same command goes on where it stopped, and a finished task is not done again.

    Raises:
        ValueError: from the constructor, for settings that cannot be met.
    """

    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness, or parts of a suite, by name."""
    suite: Literal["ccq-paper", "kla-paper", "offline"] | None = None
    """All of ccq-paper (WikiText, LAMBADA, zero-shot, needles, LongBench, length curves), kla-paper (recall on checkpoints trained for it,
    1-64 K curves on `text`) or offline (what the folder `data` has files for)."""
    text: tuple[str, ...] = ()
    """Texts to measure perplexity by context length on: files, folders, parquet or jsonl (`text`), `stdlib`, or
    hub:NAME[:CONFIG[:SPLIT[:COLUMN]]]."""
    lengths: tuple[int, ...] = ()
    """Context lengths of the curves, in tokens; the suite's own if none are given, and 1,024 to 65,536 for `text`."""
    tokens: int = 2**18
    """Tokens scored at each context length, at most; at least one window is."""
    data: Path | None = None
    """A folder of local files, read in place of the hub: TASK.jsonl or TASK.parquet, in it or in its folder eval. docs/evaluation.md has
    the names."""
    limit: int | None = None
    """Only so many rows (samples, needles) of each task: for a first look."""
    few_shot: int | None = None
    """Examples before each question; None: as many as the task says, which is none for all tasks of the suites."""
    batch_size: int = 8
    """Sequences run side by side. It changes the time, not the score."""
    max_length: int | None = None
    """Tokens given to a model at most; None: what its configuration says, and no limit where it says nothing, as ours."""
    document_token: bool | None = None
    """Put the document token (bos, else eos) before every text. None: for our models, trained so; others as their tokenizer does."""
    tokenizer: str | None = None
    """`bytes`, or a folder or name of a Hugging Face tokenizer; None: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights; auto: as they were saved."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    out: Path = Path("runs/eval")
    """Folder for rows (results.jsonl), results.json and report.html."""
    restart: bool = False
    """Measure again what earlier runs of these settings left in the folder."""

    def __post_init__(self) -> None:
        if not (self.tasks or self.suite or self.text):
            raise ValueError(f"nothing to measure: give tasks, a text, or a suite ({', '.join(SUITES)})")
        for name in ("limit", "batch_size", "max_length", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not positive")
        if self.few_shot is not None and self.few_shot < 0:
            raise ValueError(f"few_shot={self.few_shot} is negative")
        if any(length < 1 for length in self.lengths) or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths={list(self.lengths)}: all must be positive, and none may stand twice")
