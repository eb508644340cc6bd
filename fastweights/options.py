"""A rule's options: a keyword-only frozen dataclass with a docstring under each field. Here is what all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


def option_defaults(options: type) -> dict[str, Any]:
    """Name and default of every option of an ``Options`` class."""
    return {field.name: field.default for field in dataclasses.fields(options)}


def build_options(owner: str, options: type, given: Mapping[str, Any]) -> Any:
    """``options(**given)``, a whole number taken for a float as JSON writes it; ValueError for an option that does not exist."""
    known = option_defaults(options)
    check_known(owner, given, known)
    return options(**{name: float(value) if type(value) is int and type(known[name]) is float else value for name, value in given.items()})


def check_known(owner: str, given: Collection[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{owner} has no option {', '.join(map(repr, unknown))}; it has: {', '.join(known) or 'none'}")


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not True or False")


def check_between(name: str, value: Any, low: float, high: float, *, open_ends: bool = False) -> None:
    """``low ≤ value ≤ high``, or strictly between with ``open_ends``; NaN is refused."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (low < value < high if open_ends else low <= value <= high):
        raise ValueError(f"{name}={value!r} is not a number {f'in ({low}, {high})' if open_ends else f'in [{low}, {high}]'}")
