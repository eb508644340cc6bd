"""Do an experiment: ``python experiments/run.py 001``. Interrupted, the same call goes on; done, it writes what the rows say.

An experiment is a folder NNN_name with a config.py:

* ``QUESTION``: what is asked, in a line.
* ``run(lab)``: calls of `Lab.fastweights` and `Lab.together`, whose outputs go to runs/experiments/NNN_name, which is not committed.
* ``rows(folder)``: the rows that are kept of those outputs, in results.jsonl; each with its provenance, seed and n.
* ``answer(rows)``, ``table(rows)``, ``figure(rows)``: a sentence for the README of the project, a table for that of the experiment, an SVG.

``python experiments/run.py`` without a number makes tables, answers and figures anew from the rows that are recorded.
Texts that do not come with Python are looked for in the folder that FASTWEIGHTS_DATA names, and rows name them by that variable.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights.records import append_rows, read_rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA = "FASTWEIGHTS_DATA"
MARKED = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", flags=re.S)
Row = dict[str, Any]


class Lab:
    """Where an experiment's commands run."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / "runs" / "experiments" / name

    def start(self, name: str, arguments: str) -> subprocess.Popen:
        """`fastweights ARGUMENTS --out FOLDER/name`, in a process group of its own."""
        if DATA in arguments and DATA not in os.environ:
            raise SystemExit(f"{DATA} does not name the folder of the texts that docs/evaluation.md lists")
        words = [os.path.expandvars(word) for word in shlex.split(arguments)]
        return subprocess.Popen(
            [sys.executable, "-m", "fastweights", *words, "--out", str(self.place(name))],
            cwd=ROOT,
            start_new_session=True,
        )

    def place(self, name: str) -> Path:
        """Where the outputs of `name` go, as a command of the experiment names it."""
        return self.folder.relative_to(ROOT) / name

    def together(self, chains: Sequence[Sequence[tuple[str, str]]], lanes: int) -> list[str]:
        """Chains of (name, arguments), `lanes` at a time: a command begins when the one before it has ended well.

        Returns the names of those that did not end well; the other chains go on.
        """
        waiting, running, failed = deque(deque(chain) for chain in chains), list[tuple[subprocess.Popen, str, deque]](), list[str]()
        try:
            while waiting or running:
                while waiting and len(running) < lanes:
                    chain = waiting.popleft()
                    name, arguments = chain.popleft()
                    running.append((self.start(name, arguments), name, chain))
                time.sleep(0.2)
                ended = [lane for lane in running if lane[0].poll() is not None]
                running = [lane for lane in running if lane not in ended]
                for process, name, rest in ended:
                    if process.returncode:
                        failed.append(name)
                    elif rest:
                        waiting.appendleft(rest)
        finally:
            for process, *_ in running:
                process.terminate()
            for process, *_ in running:
                process.wait()
        return failed

    def fastweights(self, name: str, arguments: str) -> None:
        """The same, to its end. A command that is finished says so at once; one that was interrupted goes on."""
        process = self.start(name, arguments)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code:
            raise SystemExit(code)


def folders() -> list[Path]:
    return sorted(path.parent for path in HERE.glob("[0-9][0-9][0-9]_*/config.py"))


def recorded() -> list[Path]:
    """Those that have been done."""
    return [folder for folder in folders() if (folder / "results.jsonl").exists()]


def config(folder: Path) -> dict[str, Any]:
    return runpy.run_path(str(folder / "config.py"))


def do(folder: Path) -> None:
    experiment, lab = config(folder), Lab(folder.name)
    experiment["run"](lab)
    file = folder / "results.jsonl"
    rows = [_named_by_variable(row) for row in experiment["rows"](lab.folder)]
    file.unlink(missing_ok=True)
    append_rows(file, rows)


def write(folder: Path) -> None:
    """Figure and table of an experiment, from its rows."""
    experiment, rows = config(folder), read_rows(folder / "results.jsonl")
    (folder / "figure.svg").write_text(experiment["figure"](rows) + "\n", encoding="utf-8")
    _between_marks(folder / "README.md", experiment["table"](rows))


def answers() -> str:
    """What the README of the project says: a line an experiment."""
    lines = ["| question | answer so far | rows |", "|---|---|---|"]
    for folder in recorded():
        experiment, rows = config(folder), read_rows(folder / "results.jsonl")
        lines.append(f"| {experiment['QUESTION']} | {experiment['answer'](rows)} | [{folder.name}](experiments/{folder.name}) |")
    return "\n".join(lines) + "\n"


def _named_by_variable(row: Row) -> Row:
    """Paths of this machine mean nothing elsewhere."""
    data = os.environ.get(DATA)
    return json.loads(json.dumps(row).replace(data.rstrip("/"), f"${DATA}")) if data else row


def _between_marks(file: Path, text: str) -> None:
    before = file.read_text(encoding="utf-8")
    if len(MARKED.findall(before)) != 1:
        raise SystemExit(f"{file} has no one place between <!-- results --> and <!-- end of results -->")
    file.write_text(MARKED.sub(lambda _: text, before), encoding="utf-8")


def main(arguments: list[str]) -> None:
    chosen = [folder for folder in folders() if folder.name[:3] in arguments or folder.name in arguments]
    if len(chosen) < len(arguments):
        raise SystemExit(f"{' '.join(arguments)}: experiments are {', '.join(folder.name for folder in folders())}")
    for folder in chosen:
        do(folder)
    for folder in chosen or recorded():
        write(folder)
    _between_marks(ROOT / "README.md", answers())


if __name__ == "__main__":
    main(sys.argv[1:])
