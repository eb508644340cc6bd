"""Where a number came from: every result row carries the command, commit, versions, device and seed that made it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

PACKAGES = ("fastweights", "torch", "triton", "transformers")


@cache
def commit() -> str:
    """The short hash of the checkout this package runs from, with ``+changes`` when files differ from it; ``unknown`` outside git.

    FASTWEIGHTS_COMMIT says it instead, for a copy of a tree that has no history, or another's.
    """
    if os.environ.get("FASTWEIGHTS_COMMIT"):
        return os.environ["FASTWEIGHTS_COMMIT"]
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    if not (root / ".git").exists():  # an installed wheel: an enclosing repository would lie
        return "unknown"
    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on, and of Python; a package that is absent is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str | None = None) -> str:
    """``NVIDIA H200`` for a CUDA device, else the processor's name and the number of threads torch uses."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(*, device: str | None = None, seed: int | None = None) -> dict[str, Any]:
    """The fields every result row ends with."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m fastweights
    command = [name, *sys.argv[1:]]
    row: dict[str, Any] = {
        "command": shlex.join(command),
        "commit": commit(),
        "device": device_name(device),
        "versions": versions(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if seed is not None:
        row["seed"] = seed
    return row


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON-lines file, each flushed to disk whole, so that an interrupted run loses nothing it had finished."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: of two processes, one mends or appends
        _mend(file)
        for row in rows:
            file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line cut short by a kill is dropped. A missing file has no rows.

    Raises:
        ValueError: another line is no JSON object, or no text.
    """
    path = Path(path)
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_row(line))
            except ValueError as error:
                raise ValueError(f"{path} is not JSON lines: line {number}: {error}") from None
    with contextlib.suppress(ValueError):
        rows += [_row(last)]
    return rows


def rows_by_run(path: str | Path) -> dict[str, dict[str, Any]]:
    """`read_rows` by their ``run``, of which the last counts.

    Raises:
        ValueError: as `read_rows`, and for a row without a run, which no command of ours has written.
    """
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        if "run" not in row:
            raise ValueError(f"{path}: row {number} has no 'run', by which finished runs are known: remove it, or give another --out")
    return {row["run"]: row for row in rows}


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a row is an object, and this is {line[:40]!r}")
    return row


def _mend(file: BinaryIO) -> None:
    """What a kill left of a last line goes, as `read_rows` drops it, so that the next row does not become a part of it."""
    if not file.tell():
        return
    file.seek(-1, os.SEEK_END)
    if file.read() == b"\n":
        return
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    try:
        _row(content[end:])
    except ValueError:
        file.truncate(end)
    else:
        file.write(b"\n")  # all of it but its end
