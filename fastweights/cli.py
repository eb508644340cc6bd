"""The command `fastweights`: a function per subcommand, which calls a recipe. What is done stands there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence

from fastweights.recipes.demo import DEMO
from fastweights.recipes.settings import CompareSettings

EXTRAS = {"cli": ("tyro", "rich"), "train": ("accelerate", "pyarrow"), "report": ("matplotlib",)}
"""A package or two of each extra, by whose absence a missing extra is told."""


class CannotDo(Exception):
    """What was asked for cannot be met; the message is one line that says why."""


def compare(settings: CompareSettings) -> None:
    """Train mixers at equal parameters on the same text, and compare them in a table and a report."""
    _need("train", "report")
    from rich.console import Console

    from fastweights.recipes.compare import plan_comparison, run_plan

    try:
        plan = plan_comparison(settings)
    except (ValueError, OSError) as error:
        raise CannotDo(error) from error
    run_plan(plan, Console())


def demo(settings: CompareSettings = DEMO) -> None:
    """A first look, in minutes on two cores: gated_deltanet, kla and both with CCQ, trained on the standard library's source."""
    compare(settings)


COMMANDS: dict[str, Callable[..., None]] = {"compare": compare, "demo": demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 a request that cannot be met, 130 interrupted."""
    try:
        _need("cli")
        import tyro

        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="fastweights",
            description="Linear attention as a fast-weight memory: train, compare, measure.",
            args=sys.argv[1:] if arguments is None else list(arguments),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except CannotDo as error:
        print(f"fastweights: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _need(*extras: str) -> None:
    for extra in extras:
        if any(importlib.util.find_spec(package) is None for package in EXTRAS[extra]):
            raise CannotDo(f"this needs the extra {extra!r}: pip install 'fastweights[{extra}]'")
