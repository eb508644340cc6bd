import io
import os
import signal
import time
from dataclasses import dataclass

import pytest
from rich.console import Console

from fastweights.recipes import pool
from fastweights.recipes.errors import CannotDo
from fastweights.recipes.pool import cores, run_jobs, threads_of


@dataclass(frozen=True)
class Fake:
    """Counts to its number, a tenth of a second each, unless it is told to fail, to die or to stop."""

    name: str
    steps: int
    fails: bool = False
    dies: bool = False

    def run(self, report, should_stop):
        for step in range(self.steps):
            if should_stop():
                return None
            report("counting", step, self.steps, f"{step} seen")
            time.sleep(0.1)
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails:
            raise FloatingPointError(f"{self.name} came to nothing")
        return {"name": self.name}


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.full)])
def run(request):
    """(rows as they came, what was shown, the exception) in this process, and in two of their own."""

    def run(*jobs):
        rows, console, failure = [], Console(file=io.StringIO(), width=120), None
        try:
            run_jobs(jobs, processes=request.param, threads=1, console=console, on_row=rows.append)
        except FloatingPointError as error:
            failure = str(error)
        return [row["name"] for row in rows], console.file.getvalue(), failure

    return run


def test_every_row_comes_and_every_phase_is_told(run):
    rows, shown, failure = run(Fake("a", 2), Fake("b", 3), Fake("c", 1))
    assert sorted(rows) == ["a", "b", "c"] and failure is None
    assert all(f"{name}: counting" in shown for name in "abc")


def test_without_a_terminal_a_line_a_minute_tells_how_far_it_is(monkeypatch):
    """And the time left by the pace of this session, which began in the middle."""
    now, console = [0.0], Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(pool.time, "monotonic", lambda: now[0])
    report = pool._lines("a", console)
    report("counting", 0, 1000, "")
    for step in range(991, 1001):
        now[0] += 25
        report("counting", step, 1000, f"loss {step}" if step > 995 else "")
    report("done", 1, 1, "")
    assert console.file.getvalue().splitlines() == [
        "a: counting",
        "a: counting 993 of 1,000, 0:02:55 left",
        "a: counting 996 of 1,000, loss 996, 0:01:40 left",
        "a: counting 999 of 1,000, loss 999, 0:00:25 left",
        "a: done",
    ]


def test_a_failure_is_raised_and_takes_no_finished_row_with_it(run):
    rows, _, failure = run(Fake("a", 1), Fake("b", 3, fails=True), Fake("c", 600))
    assert rows == ["a"] and failure == "b came to nothing"


@pytest.mark.full
def test_a_run_whose_process_is_killed_is_named():
    rows, jobs = [], [Fake("quick", 1), Fake("greedy", 3, dies=True), Fake("patient", 600), Fake("waiting", 1)]
    with pytest.raises(CannotDo, match=r"^greedy: its process died by SIGKILL; .* Finished runs .* are kept, and the same command goes on"):
        run_jobs(jobs, processes=3, threads=1, console=Console(file=io.StringIO()), on_row=rows.append)
    assert {"name": "quick"} in rows


def test_threads_of_a_process():
    """A GPU's host waits with one thread; on a CPU the cores are shared out, and every process has one."""
    assert threads_of("cuda", 1) == threads_of("cuda:3", 1) == threads_of("cuda", 4) == 1
    assert threads_of("cpu", 1) == cores() and threads_of("cpu", cores()) == threads_of("cpu", 1000) == 1
