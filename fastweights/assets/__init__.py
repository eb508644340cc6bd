"""What ships with the package besides code. Importing this loads nothing."""

from __future__ import annotations

from pathlib import Path


def byte_model_path() -> Path:
    """The folder of a small language model of Python source: kla+ccq, a byte a token, under 2 MB; for examples, tests and a first look.

    A Hugging Face folder as `fastweights train --preset byte` leaves it, with its model card in README.md.
    """
    return Path(__file__).parent / "byte_model"
