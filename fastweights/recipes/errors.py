"""What commands say when they cannot do what was asked of them."""

from __future__ import annotations


class CannotDo(ValueError):
    """What was asked for cannot be met; the message is one line that says why, and the command line shows nothing else."""
