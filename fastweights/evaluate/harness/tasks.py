"""Tasks of lm-evaluation-harness by name, with its own prompts, on the data it names or on files of the user's."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval.api.task
import lm_eval.tasks
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

QUICK = ("arc", "hellaswag", "lambada", "longbench", "openbookqa", "piqa", "ruler", "siqa", "super_glue/boolq", "wikitext", "winogrande")
"""Folders of the harness that hold the suites' tasks. To read all of them takes it ten seconds."""
SEED = 0
"""Of what a task draws while it is built."""


class Unavailable(Exception):
    """A task that cannot be measured here; the message is one line that says why, and what would help."""


class LocalFile(NamedTuple):
    """Rows for a task, in the columns of the data set that the harness names."""

    path: Path
    note: str = ""
    """What a reader of the score must know."""


def load_task(name: str, *, file: LocalFile | None = None, changes: Mapping[str, Any] | None = None) -> Task:
    """The harness's task, which brings its prompts and metrics. ``file`` replaces where the rows come from, and nothing else.

    Args:
        changes: further fields of the task's configuration to replace, as the needle tasks do with their generator.

    Raises:
        Unavailable: there is no such task, its data cannot be had, or a package it needs is missing.
    """
    manager = _manager(name)
    if name not in manager.all_subtasks:
        raise Unavailable(f"lm-evaluation-harness has no task {name!r}")
    replaced = (_rows_from(file.path) if file else {}) | dict(changes or {})
    random.seed(SEED)
    try:
        with quiet():
            task = manager.load({"group": "fastweights", "task": [{"task": name, **replaced}]})["tasks"][name]
            if file:
                task.build_all_requests(limit=1)  # are these the task's rows?
    except ModuleNotFoundError as error:
        raise Unavailable(f"the package {error.name!r} is missing: pip install 'fastweights[eval]'") from error
    except ImportError as error:  # the harness says which packages
        raise Unavailable(_one_line(error)) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        source = f"{file.path} cannot be read" if file else "its data cannot be fetched"
        help_ = "" if file else f"; put the rows into {name}.jsonl in the folder given by --data"
        raise Unavailable(f"{source}: {_one_line(error)}{help_}") from error
    except Exception as error:  # of the task's own code, which looks at the rows while it is built
        if file is None:
            raise
        what = f"{type(error).__name__}: {_one_line(error)}".removesuffix(": ")
        raise Unavailable(f"{file.path} does not hold rows of {name}, with the columns that docs/evaluation.md names: {what}") from error
    return task


def _rows_from(path: Path) -> dict[str, Any]:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    splits = dict.fromkeys(("training_split", "validation_split", "fewshot_split"))
    source = {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(path)}}}
    return {**source, **splits, "test_split": "test", "custom_dataset": None}


def _manager(name: str) -> TaskManager:
    return quick if name in (quick := _task_index(True)).all_subtasks else _task_index(False)


@cache
def _task_index(quick: bool) -> TaskManager:
    root = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_defaults=not quick, include_path=[root / folder for folder in QUICK] if quick else None)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and remarks of the harness and of datasets: who calls shows progress."""
    logger, bars = logging.getLogger("lm_eval"), datasets.utils.are_progress_bars_disabled()
    level, bar = logger.level, lm_eval.api.task.tqdm
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = partial(bar, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that the harness loads: a slower form of theirs, an escape sequence
            yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()


def go_offline_if_the_hub_is_out_of_reach(seconds: float = 5.0) -> bool:
    """Ask once, instead of half a minute of retries for every data set; what was fetched before is then read from the cache.

    Returns whether the hub can be asked.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=seconds)
        return True
    except Exception:  # of whichever HTTP library the hub's client uses
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        return False


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
