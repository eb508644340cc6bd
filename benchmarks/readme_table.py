"""The demo's table for README.md, from its recorded results: ``python benchmarks/readme_table.py`` writes it between the markers.

``cp runs/demo/results.json benchmarks/results/demo.json`` first, to record a new run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo.json"
MARKED = re.compile(r"(?<=<!-- demo table -->\n).*?(?=<!-- end of demo table -->)", flags=re.S)


def table(results: dict) -> str:
    """Markdown, with where it comes from below it."""
    summary = results["summary"]
    last = summary[0]["lengths"][-1]["length"]
    lines = [
        f"| mixer | parameters | bits per byte at the training length | difference | at {last:,} bytes of context |",
        "|---|---|---|---|---|",
    ]
    for entry in summary:
        difference = entry["validation"]["difference"]
        lines.append(
            f"| {entry['label']} | {entry['parameters']:,} | {_number(entry['validation']['bits_per_byte'])} | "
            f"{_number(difference, '+') if difference else ''} | {_number(entry['lengths'][-1]['bits_per_byte'])} |"
        )
    seeds = ", ".join(str(seed) for seed in summary[0]["seeds"])
    source = f"`{results['command']}` at {results['commit']}, seed {seeds}, {summary[0]['tokens']:,} bytes each, {results['device']}"
    return "\n".join([*lines, "", f"{source}. ± is half of a 95 % interval over documents; the difference is to the first row.", ""])


def _number(estimate: dict, sign: str = "") -> str:
    return f"{estimate['value']:{sign}.3f} ± {(estimate['high'] - estimate['low']) / 2:.3f}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(MARKED.sub(lambda _: table(json.loads(RESULTS.read_text())), readme.read_text()))
