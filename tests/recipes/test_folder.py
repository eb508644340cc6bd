"""One process at a time in a folder, and a line where a folder cannot be written into."""

import subprocess
import sys

import pytest
from rich.console import Console

from fastweights.assets import byte_model_path
from fastweights.recipes.errors import CannotDo
from fastweights.recipes.folder import alone_in

HOLD = """
import pathlib, sys
from fastweights.recipes.folder import alone_in
with alone_in(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    input()
"""


def test_another_process_is_kept_out_for_as_long_as_the_first_lives(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "a/b")], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"in\n"
        with (
            pytest.raises(CannotDo, match=r"another process is at work in .*a/b: wait for it, or give another --out"),
            alone_in(tmp_path / "a/b"),
        ):
            pytest.fail("it was let in")
        with alone_in(tmp_path / "a"):
            other.kill()
    with alone_in(tmp_path / "a/b"), pytest.raises(CannotDo, match="another process"), alone_in(tmp_path / "a/b"):
        pytest.fail("it was let in")  # a lock is of an opened file, so that one process can play both
    with alone_in(tmp_path / "a/b"):
        pass


@pytest.mark.parametrize("inside, told", [("", "File exists"), ("x/y", "Not a directory")])
def test_a_folder_that_cannot_be_is_told(tmp_path, inside, told):
    (tmp_path / "file").touch()
    with pytest.raises(CannotDo, match=rf"cannot write into the folder '.*file/?{inside}': {told}"), alone_in(tmp_path / "file" / inside):
        pytest.fail("it was let in")


def compare(folder):
    from fastweights.recipes.compare import Plan, run_plan
    from fastweights.recipes.settings import CompareSettings

    run_plan(Plan(CompareSettings(out=folder), [], 0, 0, 0), Console())


def compare_on_task(folder):
    from fastweights.recipes.task_compare import run_plan
    from fastweights.recipes.task_settings import TaskCompareSettings

    run_plan(TaskCompareSettings(task="mqar", out=folder), [], Console())


def bench(folder):
    from fastweights.recipes.bench import Plan, run_bench
    from fastweights.recipes.bench_settings import BenchSettings

    run_bench(Plan("decode", [], BenchSettings(out=folder.parent)), Console())


def evaluate(folder):
    from fastweights.recipes.evaluate import evaluate
    from fastweights.recipes.evaluate_settings import EvalSettings

    evaluate([str(byte_model_path())], EvalSettings(tasks=("piqa",), out=folder), Console())


def inspect(folder):
    from fastweights.recipes.inspect import prepare, run
    from fastweights.recipes.inspect_settings import InspectSettings

    run(prepare(str(byte_model_path()), "some words", InspectSettings(out=folder, device="cpu")), Console())


@pytest.mark.parametrize("command", [compare, compare_on_task, bench, evaluate, inspect])
def test_every_command_that_writes_a_folder_is_alone_in_it(tmp_path, command):
    """`train` is asked in test_train."""
    with alone_in(tmp_path / "decode"), pytest.raises(CannotDo, match=r"another process is at work in .*decode"):
        command(tmp_path / "decode")
