"""How an answer's tokens are chosen and when it ends. Importing this loads nothing heavy: the command line is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastweights.options import check_between, check_flag


@dataclass(kw_only=True, frozen=True)
class Sampling:
    """The filters work in the order of the fields, as transformers' do, on the probabilities that the ones before have left.

    Raises:
        ValueError: from the constructor, for values that mean nothing.
    """

    __no_type_check__: ClassVar[bool] = True  # what is no number is told as what no number may be

    max_new_tokens: int = 256
    """The answer ends after so many tokens, if not before."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the answer has had are divided by it where positive, else multiplied; 1 changes nothing."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token every time."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that make up a probability of p together, the one that reaches it included."""
    min_p: float = 0.0
    """Only tokens at least min_p times as likely as the likeliest."""
    seed: int | None = None
    """The same seed draws the same tokens, whatever else is in the batch. Without one, torch's default generator gives one."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    speculate: int = 0
    """Up to so many tokens at a time are guessed from earlier text and checked in one pass; exact, and for greedy decoding only."""

    def __post_init__(self) -> None:
        _check_count("max_new_tokens", self.max_new_tokens, 1)
        check_between("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)  # beyond, logits times it leave float32
        if not (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3):  # beyond, logits over temperature leave float32
            raise ValueError(f"temperature={self.temperature!r} is neither 0 (greedy) nor in [0.001, 1000]")
        _check_count("top_k", self.top_k, 0, 2**63 - 1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} is not in (0, 1]")
        check_between("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_count("seed", self.seed, 0, 2**63 - 1)
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop={self.stop!r} is not a tuple of strings that are not empty")
        object.__setattr__(self, "stop", tuple(self.stop))
        check_flag("ignore_eos", self.ignore_eos)
        _check_count("speculate", self.speculate, 0)
        if self.speculate and not self.plain:
            raise ValueError(
                f"speculate={self.speculate} needs greedy decoding, temperature=0 and repetition_penalty=1; got "
                f"temperature={self.temperature} and repetition_penalty={self.repetition_penalty}"
            )

    @property
    def plain(self) -> bool:
        """Is every token simply the likeliest?"""
        return self.temperature == 0 and self.repetition_penalty == 1


def _check_count(name: str, value: object, low: int, high: float | int = float("inf")) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} is not a whole number from {low}{'' if high == float('inf') else f' to {high}'}")
