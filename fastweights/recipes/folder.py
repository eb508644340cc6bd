"""Folders as commands take them: what a saved model is in, and what is written into. Importing this loads nothing heavy."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from fastweights.recipes.errors import CannotDo

LOCK = ".lock"


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and keep others out of it: two at once would remove each other's checkpoints while they are written, and do
    everything twice. The lock ends with the process, also by a kill.

    Raises:
        CannotDo: the folder cannot be written into, or another process is at work in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotDo(f"another process is at work in {folder}: wait for it, or give another --out") from None
        except OSError as error:
            raise CannotDo(f"cannot write into the folder {str(folder)!r}: {error.strerror}") from None
        yield


def check_saved(folder: str) -> None:
    """CannotDo unless it may be what ``save_pretrained`` wrote."""
    if not (Path(folder) / "config.json").is_file():
        where = "models of `fastweights compare` are in OUT/models/NAME/model"
        raise CannotDo(f"{folder!r} is not the folder of a saved model: it has no config.json ({where})")
