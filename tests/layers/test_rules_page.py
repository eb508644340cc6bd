"""docs/rules.md has a section for every rule, and names every option with its default."""

import dataclasses
import re
from pathlib import Path

import pytest

from fastweights.layers import mixer_options
from fastweights.read import READ_RULES
from fastweights.write import WRITE_RULES

PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")


def section(name):
    found = re.search(rf"^## {name}\n(.*?)(?=^##? |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/rules.md has no section '## {name}'"
    return found.group(1)


@pytest.mark.parametrize("name", [*WRITE_RULES, *READ_RULES])
def test_every_rule_has_its_section_and_every_option_its_row(name):
    text = section(name)
    if name == "gated_deltanet":
        assert "Options as [deltanet]" in text
        text = section("deltanet")
    options = mixer_options(name if name in WRITE_RULES else f"linear+{name}")
    for option, default in options.items():
        row = re.search(rf"^\| `{option}` \| (\S+) \|", text, re.MULTILINE)
        assert row, f"{option} of {name}"
        assert row.group(1).strip("`") == str(default).replace("1e-06", "1e-6"), option
    rule = WRITE_RULES.get(name) or READ_RULES[name]
    assert bool(dataclasses.fields(rule.Options)) != ("No options" in text)
