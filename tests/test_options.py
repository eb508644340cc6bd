"""What all rules' options share."""

import dataclasses

import pytest

from fastweights.options import build_options, check_between, check_choice, check_flag, option_defaults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    strength: float = 1.0
    places: int = 2


def test_defaults_and_unknown_names():
    assert option_defaults(Options) == {"strength": 1.0, "places": 2}
    assert build_options("rule", Options, {"strength": 2}) == Options(strength=2.0)
    assert isinstance(build_options("rule", Options, {"strength": 2}).strength, float)
    assert isinstance(build_options("rule", Options, {"places": 3}).places, int)
    with pytest.raises(ValueError, match="rule has no option 'strenght', 'x'; it has: strength, places"):
        build_options("rule", Options, {"strenght": 1, "x": 2})


@pytest.mark.parametrize("value", [1, "true", None])
def test_flags_are_booleans(value):
    check_flag("f", True)
    with pytest.raises(ValueError, match="is not True or False"):
        check_flag("f", value)


@pytest.mark.parametrize("value", ["c", None, 1, True])
def test_choices(value):
    check_choice("c", "a", ("a", "b"))
    check_choice("c", None, (True, False, None))
    with pytest.raises(ValueError, match=r"c=.* is not one of 'a', 'b'"):
        check_choice("c", value, ("a", "b"))


@pytest.mark.parametrize("value", [0.99, 2.01, float("nan"), True, "1.5", None])
def test_ranges(value):
    check_between("r", 1, 1.0, 2.0)
    check_between("r", 2.0, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"r=.* is not a number in \[1.0, 2.0\]"):
        check_between("r", value, 1.0, 2.0)
    for end in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"is not a number in \(0.0, 1.0\)"):
            check_between("r", end, 0.0, 1.0, open_ends=True)
