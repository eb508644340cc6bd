"""The checkpoints in a run's folder: those that the Trainer names, and nothing that somebody has put beside them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path


def checkpoints(folder: Path) -> list[Path]:
    """The folders ``checkpoint-<step>`` by their steps, whole or not."""
    steps = {int(path.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*") if _is_checkpoint(path)}
    return [steps[step] for step in sorted(steps)]


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint of a run; what a kill left half-written is removed."""
    whole: dict[int, Path] = {}
    for path in checkpoints(folder):
        try:
            whole[int(json.loads((path / "trainer_state.json").read_text())["global_step"])] = path  # the Trainer writes this file last
        except (OSError, ValueError, KeyError):
            shutil.rmtree(path, ignore_errors=True)
    return str(whole[max(whole)]) if whole else None


def keep_newest(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest."""
    of_run = checkpoints(folder)
    for path in of_run[: max(0, len(of_run) - count)]:
        shutil.rmtree(path, ignore_errors=True)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and re.fullmatch(r"checkpoint-[0-9]+", path.name) is not None
