"""The command `fastweights`: a function per subcommand, which calls a recipe. What is done stands there."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from fastweights.recipes.bench_settings import BenchSettings, What
from fastweights.recipes.demo import DEMO
from fastweights.recipes.errors import CannotDo
from fastweights.recipes.evaluate_settings import EvalSettings
from fastweights.recipes.folder import check_saved
from fastweights.recipes.generate_settings import GenerateSettings
from fastweights.recipes.inspect_settings import InspectSettings
from fastweights.recipes.serve_settings import ServeSettings
from fastweights.recipes.settings import CompareSettings
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.recipes.train_presets import PRESETS, preset_run
from fastweights.recipes.train_settings import TrainingRun

EXTRAS = {
    "cli": ("tyro", "rich"),
    "train": ("accelerate", "pyarrow"),
    "report": ("matplotlib",),
    "eval": ("lm_eval",),
    "serve": ("fastapi", "uvicorn", "pydantic", "openai"),
}
"""A package or two of each extra, by whose absence a missing extra is told."""

FIRST_PRESET = "kla+ccq-5m"
"""What `train` does without --preset."""


def compare(settings: CompareSettings) -> None:
    """Train mixers at equal parameters on the same text, and compare them in a table and a report. With --task NAME: on a task of recall
    or state, such as mqar; `compare --task mqar --help` has the settings."""
    _need("train", "report")
    from rich.console import Console

    from fastweights.recipes.compare import plan_comparison, run_plan

    run_plan(plan_comparison(settings), Console())


def demo(settings: CompareSettings = DEMO) -> None:
    """A first look, in minutes on two cores: gated_deltanet, kla and both with CCQ, trained on the standard library's source."""
    compare(settings)


def compare_on_task(settings: TaskCompareSettings) -> None:
    """Train mixers from scratch on fresh examples of a task, and compare what they recall in a table and a report."""
    _need("train", "report")
    from rich.console import Console

    from fastweights.recipes.task_compare import plan_jobs, run_plan

    run_plan(settings, plan_jobs(settings), Console())


def train(settings: TrainingRun = preset_run(FIRST_PRESET)) -> None:  # noqa: B008, a frozen dataclass
    """Train a language model on text: --preset NAME, and any setting in its place. Interrupt it, and the same command goes on."""
    _need("train")
    from rich.console import Console

    from fastweights.recipes.train import plan_training, run_training

    console = Console(quiet=os.environ.get("RANK", "0") != "0")  # of the processes that torchrun started, one tells
    run_training(plan_training(settings), console)


def train_from(arguments: Sequence[str]) -> Callable[..., None]:
    """`train` with the preset that the arguments name as its defaults; its help has all names."""
    name = FIRST_PRESET
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = argument.partition("=")
        if flag == "--preset":
            name = value if equals else following
    run = preset_run(name)

    def from_preset(settings: TrainingRun = run) -> None:
        train(settings)

    from_preset.__doc__ = f"{train.__doc__}\n\nPresets: {', '.join(PRESETS)}."
    return from_preset


def inspect(model: str, text: str = "", /, settings: InspectSettings = InspectSettings()) -> None:  # noqa: B008, a frozen dataclass
    """Put a saved model's memories under the microscope: what each layer and head writes, forgets, keeps and reads, token by token.

    Args:
        model: folder of a saved model with its tokenizer; models of `compare` are in OUT/models/NAME/model.
        text: a file (its first document), or words as they are.
    """
    _need("train", "report")
    check_saved(model)  # before anything heavy is imported, so that a misspelt name costs no time
    from rich.console import Console

    from fastweights.recipes.inspect import prepare, run

    run(prepare(model, text, settings), Console())


def report(
    files: tuple[Path, ...],
    /,
    out: Path = Path("report.html"),
    title: str = "fastweights report",
    export: tuple[Literal["svg", "png"], ...] = (),
) -> None:
    """One self-contained HTML page of any set of result files: tables, plots, the exact commands that made them.

    Args:
        files: results.json or .jsonl files of any command or benchmark, or folders that hold them. Models looked at with `inspect` stand
            side by side.
        out: the page.
        title: its heading.
        export: also write every figure to files, into the folder NAME_figures beside the page.
    """
    _need("train", "report")
    from fastweights.recipes.report import report as write

    page, *figures = write(files, out, title=title, export=export)
    print(f"Report: {page}" + (f"   {len(figures)} figures: {figures[0].parent}" if figures else ""))


def evaluate(models: tuple[str, ...], /, settings: EvalSettings) -> None:
    """Measure saved models on language tasks (lm-evaluation-harness), needles, recall, and perplexity by context length.

    Args:
        models: folders of saved models, or names on the hub; several stand side by side. Models of `compare` are in OUT/models/NAME/model.
    """
    _need("train", "report", "eval")
    from rich.console import Console

    from fastweights.recipes.evaluate import evaluate as run

    results = run(models, settings, Console())
    if missing := results["missing"]:
        reasons = "\n".join(f"  {entry['model']}, {entry['task']}: {entry['reason']}" for entry in missing)
        raise CannotDo(f"{len(missing)} of {len(missing) + len(results['rows'])} could not be measured:\n{reasons}")


def generate(model: str, /, settings: GenerateSettings = GenerateSettings()) -> None:  # noqa: B008, a frozen dataclass
    """Write on with a saved model: --prompt TEXT, or a conversation. What it has read can be saved, and loaded again at once.

    Args:
        model: folder of a saved model with its tokenizer; models of `compare` are in OUT/models/NAME/model.
    """
    check_saved(model)
    from rich.console import Console

    from fastweights.recipes.generate import prepare, run

    run(prepare(model, settings), Console(stderr=True))


def serve(model: str, /, settings: ServeSettings = ServeSettings()) -> None:  # noqa: B008, a frozen dataclass
    """Answer requests of OpenAI's API with a saved model, until interrupted. The server is transformers' own.

    Args:
        model: folder of a saved model with its tokenizer; models of `compare` are in OUT/models/NAME/model.
    """
    _need("serve")
    check_saved(model)
    from rich.console import Console

    from fastweights.recipes.serve import prepare, run

    run(prepare(model, settings), Console(stderr=True))


def bench(what: What, models: tuple[str, ...] = (), /, settings: BenchSettings = BenchSettings()) -> None:  # noqa: B008, a frozen dataclass
    """Measure how fast models read prompts (prefill) or write on after them (decode): speed, memory, and how both grow with the length.

    Args:
        what: prefill reads prompts up to the first new token; decode writes tokens after contexts.
        models: folders of saved models, or presets, with random weights. Without any, and without --mixers: kla, kla+ccq, gated_deltanet
            and softmax, the 0.4b presets on a GPU.
    """
    _need("report")
    from rich.console import Console

    from fastweights.recipes.bench import plan_bench, run_bench

    run_bench(plan_bench(what, models, settings), Console())


COMMANDS: dict[str, Callable[..., None]] = {
    "compare": compare,
    "demo": demo,
    "train": train,
    "generate": generate,
    "serve": serve,
    "eval": evaluate,
    "inspect": inspect,
    "bench": bench,
    "report": report,
}
ON_TASK: dict[str, Callable[..., None]] = {"compare": compare_on_task}
"""What the commands are when `--task` is among the arguments: other settings fit then."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 a request that cannot be met, 130 interrupted.

    A request that cannot be met is a `CannotDo`, any other ValueError, as all of our code raises them for what it is given, or a file
    that cannot be read or written: a line says why, below the traceback if FASTWEIGHTS_TRACEBACK is set. Everything else is a fault of
    ours, and keeps its traceback.
    """
    try:
        _need("cli")
        import tyro

        arguments, config = sys.argv[1:] if arguments is None else list(arguments), (tyro.conf.OmitArgPrefixes,)
        if arguments[:1] and arguments[0] in COMMANDS:  # by itself, so that what is near a misspelt option is one of its own
            name, *rest = arguments
            parse = partial(tyro.cli, _command(name, rest), prog=f"fastweights {name}", config=config)
            _refuse_grouped(name, rest, parse)
            parse(args=rest)
        else:
            description = "Linear attention as a fast-weight memory: train, compare, measure."
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="fastweights", description=description, args=arguments, config=config)
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("FASTWEIGHTS_TRACEBACK"):
            traceback.print_exc()
        print(f"fastweights: {error if isinstance(error, CannotDo) else _line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _command(name: str, arguments: Sequence[str]) -> Callable[..., None]:
    """What the command of this name is, with these arguments behind it."""
    if name == "train":
        return train_from(arguments)
    on_task = any(argument.partition("=")[0] == "--task" for argument in arguments)
    return ON_TASK.get(name, COMMANDS[name]) if on_task else COMMANDS[name]


def _refuse_grouped(name: str, arguments: Sequence[str], parse: Callable[..., object]) -> None:
    """Results and errors name settings by group, as `train.steps`; options have none, and the parser finds nothing near such a name."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        if re.fullmatch(r"--[\w-]+\.[\w.-]+", flag):
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
                parse(args=["--help"])
            flags = re.findall(r"--[a-z][a-z-]*", text.getvalue())
            near = difflib.get_close_matches(f"--{flag.rpartition('.')[2].replace('_', '-')}", flags, n=1, cutoff=0.8)
            meant = f"; perhaps you meant {near[0]}" if near else ""
            raise CannotDo(f"{name} has no option {flag}{meant} (fastweights {name} --help has all)")


def _need(*extras: str) -> None:
    for extra in extras:
        if any(importlib.util.find_spec(package) is None for package in EXTRAS[extra]):
            raise CannotDo(f"this needs the extra {extra!r}: pip install 'fastweights[{extra}]'")


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
