"""Many jobs, a few at a time, one bar each; they stop together, and cleanly."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fastweights.recipes.errors import CannotDo

Row = dict[str, Any]
Report = Callable[[str, int, int, str], None]
"""Told (what is being done, how much is done, of how much, a number worth showing)."""
LINE_SECONDS = 60.0
"""Between two lines about a job, where there is no terminal for bars."""
_END = object()
_messages: Any = None
_stop: Any = None
_pids: Any = None


@runtime_checkable  # the shape checker of the tests asks
class Work(Protocol):
    """What the pool runs. Plain data: it travels to another process."""

    @property
    def name(self) -> str:
        """As people are told of it."""

    def run(self, report: Report, should_stop: Callable[[], bool]) -> Row | None:
        """The row, or None if `should_stop` ended it: a later call goes on."""


@runtime_checkable
class Pausing(Work, Protocol):
    """What may also be done in turn with others of its kind, by one process."""

    def work(self, report: Report, should_stop: Callable[[], bool]) -> Generator[None, None, Row | None]:
        """As `run`, pausing now and then."""


Result = TypeVar("Result")


def finish(work: Generator[None, None, Result]) -> Result:
    """Go through all pauses."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def run_jobs(
    jobs: Sequence[Work],
    *,
    processes: int,
    threads: int,
    console: Console,
    on_row: Callable[[Row], None],
    at_once: int = 1,
    minutes: float | None = None,
) -> None:
    """Run every job, `processes` at a time with `threads` each; `on_row` gets each row as it comes.

    A single process may do `at_once` of them in turn, if they are `Pausing`. The first interrupt (or SIGTERM) lets each job save a
    checkpoint; a second one does not wait. After `minutes`, if given, jobs save and end in the same way: those that gave no row are left.

    Raises:
        KeyboardInterrupt: it was interrupted.
        CannotDo: a process died, as by a kill for want of memory; the others were ended with it.
        Exception: the first failure of a job, after the others have saved their checkpoints.
    """
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with _board(jobs, console) as report_of, _interrupts(console) as interrupted:

        def should_stop() -> bool:
            return interrupted() or time.monotonic() > ends

        if processes == 1:
            with _threads(threads):
                _run_here(jobs, at_once, report_of, on_row, should_stop)
        else:
            _run_in_processes(jobs, processes, threads, report_of, on_row, should_stop)
        if interrupted():
            raise KeyboardInterrupt


def _run_here(jobs: Sequence[Work], at_once: int, report_of, on_row, should_stop: Callable[[], bool]) -> None:
    failures: list[Exception] = []

    def ending() -> bool:
        return bool(failures) or should_stop()

    def work(number: int, job: Work) -> Generator[None, None, None]:
        try:
            report = report_of(number)
            row = (yield from job.work(report, ending)) if isinstance(job, Pausing) else job.run(report, ending)
        except Exception as failure:
            failures.append(failure)
        else:
            if row is not None:
                on_row(row)

    waiting, running = deque(enumerate(jobs)), list[Generator]()
    while running or waiting:
        while waiting and len(running) < at_once:
            if ending():
                waiting.clear()
            else:
                running.append(work(*waiting.popleft()))
        running = [one for one in running if next(one, _END) is not _END]
    if failures:
        raise failures[0]


def _run_in_processes(jobs: Sequence[Work], processes: int, threads: int, report_of, on_row, should_stop: Callable[[], bool]) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in an unknown state
    messages, stop, pids = context.Queue(), context.Event(), context.Array("i", len(jobs))
    failure: BaseException | None = None
    with ProcessPoolExecutor(processes, context, _begin_worker, (messages, stop, pids, threads)) as pool:
        with _deaf_to_interrupts():  # which the new processes inherit: the terminal sends them its Ctrl-C too
            running = {pool.submit(_work, number, job) for number, job in enumerate(jobs)}
        children = {child.pid: child for child in multiprocessing.active_children()}
        try:
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                _drain(messages, report_of)
                for future in done:
                    if (error := future.exception()) is not None:
                        failure = failure or error
                    elif (row := future.result()) is not None:
                        on_row(row)
                if failure is not None or should_stop():
                    stop.set()
        except KeyboardInterrupt:  # the second
            for child in multiprocessing.active_children():
                child.kill()
            raise
    if isinstance(failure, BrokenProcessPool):
        raise _death({job.name: children[pid].exitcode for job, pid in zip(jobs, pids[:], strict=True) if pid in children}) from None
    if failure is not None:
        raise failure


def _death(codes: dict[str, int | None]) -> CannotDo:
    """Of the runs that were being done and how their processes ended: which died, as the pool ends the others by SIGTERM."""
    died = {name: code for name, code in codes.items() if code not in (None, -signal.SIGTERM)} or codes
    how = {f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}" for code in died.values()}
    return CannotDo(
        f"{', '.join(died) or 'a run'}: its process died {' and '.join(sorted(how))}; SIGKILL is what a system out of memory sends."
        " Finished runs and the last checkpoints of the others are kept, and the same command goes on; --processes 1 takes less memory"
    )


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin_worker(messages, stop, pids, threads: int) -> None:
    global _messages, _stop, _pids
    _messages, _stop, _pids = messages, stop, pids
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and sets `stop`
    torch.set_num_threads(threads)
    _quiet()


def _quiet() -> None:
    """The board tells what happens; transformers' own bars and remarks would tear it."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def _work(number: int, job: Work) -> Row | None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    _pids[number] = os.getpid()
    last = 0.0

    def report(phase: str, done: int, total: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2 or done in (0, total):
            last = now
            _messages.put((number, phase, done, total, note))

    row = None if _stop.is_set() else job.run(report, lambda: _stop.is_set() or not parent.is_alive())
    if not parent.is_alive():  # it was killed, and nobody else would end this process
        os._exit(1)
    _pids[number] = 0
    return row


def _drain(messages, report_of: Callable[[int], Report]) -> None:
    while True:
        try:
            number, *rest = messages.get_nowait()
        except queue.Empty:
            return
        report_of(number)(*rest)


@contextmanager
def _interrupts(console: Console) -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into an answer to the question whether one came."""
    came = threading.Event()
    kinds = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def handle(kind, frame) -> None:
        if came.is_set():
            return
        came.set()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun passes on what a cluster may have sent already, and itself ends the wait
            console.print("Stopping: each run saves a checkpoint.")
            return
        console.print("Stopping: each run saves a checkpoint. Again to stop at once.")
        for kind in kinds:
            signal.signal(kind, before[kind])

    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield came.is_set
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(count)
    _quiet()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


@contextmanager
def _board(jobs: Sequence[Work], console: Console) -> Iterator[Callable[[int], Report]]:
    """A line per job: what it does, a bar, a number, the time left. Without a terminal, `_lines` of each."""
    if not console.is_terminal:
        reports = [_lines(job.name, console) for job in jobs]
        yield reports.__getitem__
        return
    columns = (
        TextColumn("{task.fields[label]:<22}"),
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[note]:>10}"),
        TextColumn("{task.fields[taken]:>8}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task("waiting", start=False, label=job.name, note="", taken="", total=1) for job in jobs]
        phases: dict[int, str] = {}
        began: dict[int, float] = {}

        def report_of(number: int) -> Report:
            def report(phase: str, done: int, total: int, note: str) -> None:
                if phases.get(number) != phase:
                    phases[number] = phase
                    began.setdefault(number, time.monotonic())
                    progress.reset(tasks[number], description=phase, total=total)
                taken = str(datetime.timedelta(seconds=int(time.monotonic() - began[number])))
                progress.update(tasks[number], completed=done, total=total, note=note, taken=taken)

            return report

        yield report_of


def _lines(name: str, console: Console) -> Report:
    """A plain line where a phase begins, and every `LINE_SECONDS` in it: how far it is, the number, the time left."""
    told, before, since = 0.0, "", (0.0, 0)

    def report(phase: str, done: int, total: int, note: str) -> None:
        nonlocal told, before, since
        now = time.monotonic()
        if phase != before:
            told, before, since = now, phase, (now, 0)
            console.print(f"{name}: {phase}", highlight=False)
        elif since[1] == 0:
            since = now, done  # what an earlier session has done tells nothing about the pace
        elif now - told >= LINE_SECONDS and done > since[1]:
            told, left = now, (now - since[0]) / (done - since[1]) * (total - done)
            parts = [f"{done:,} of {total:,}", *([note] if note else []), f"{datetime.timedelta(seconds=round(left))} left"]
            console.print(f"{name}: {phase} {', '.join(parts)}", highlight=False)

    return report


def threads_of(device: str, processes: int) -> int:
    """Threads of one of so many processes: its share of the cores. On a GPU one: a training there was seen to keep all
    32 cores of its host busy, presumably as every copy of a batch wakes all of OpenMP's threads, which wait for the next awake."""
    return 1 if device.startswith("cuda") else max(1, cores() // max(1, processes))


def cores() -> int:
    """Cores this process may use: those that torch found, or was told of by OMP_NUM_THREADS."""
    return torch.get_num_threads()
