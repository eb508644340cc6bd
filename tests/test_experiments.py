"""Experiments: what the pages say is what the rows say, and each row says where it comes from."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights import cli
from fastweights.models import FastWeightsConfig
from fastweights.recipes.settings import Variant
from fastweights.recipes.task_compare import plan_jobs
from fastweights.recipes.task_rows import KEPT, ORIGIN
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.recipes.train_settings import TrainingRun
from fastweights.records import append_rows, read_rows

ROOT = Path(__file__).parent.parent
RUN = runpy.run_path(str(ROOT / "experiments" / "run.py"))
FOLDERS = RUN["folders"]()
RECORDED = RUN["recorded"]()
SECTIONS = ("Question", "Prediction", "Setting", "Result", "What it means")
ids = {"ids": lambda folder: folder.name}


@pytest.mark.parametrize("folder", FOLDERS, **ids)
def test_a_page_has_its_parts(folder):
    page = (folder / "README.md").read_text()
    assert re.findall(r"^\*\*([\w ]+)[.*]", page, flags=re.M) == list(SECTIONS)
    assert folder.name in (ROOT / "experiments" / "LOG.md").read_text()
    assert ("Not run yet." in page) == (folder not in RECORDED)


@pytest.mark.parametrize("folder", RECORDED, **ids)
def test_a_row_says_where_it_comes_from(folder):
    for row in read_rows(folder / "results.jsonl"):
        assert {"command", "commit", "device", "versions", "seed", "n"} <= row.keys()
        assert re.fullmatch(r"[0-9a-f]{10}", row["commit"]), "of files that are committed"
        assert not re.search(r"/(work|tmp|root|home)/", json.dumps(row)), "a path of one machine"


@pytest.mark.parametrize("folder", RECORDED, **ids)
def test_the_page_says_what_the_rows_say(folder):
    experiment, rows = RUN["config"](folder), read_rows(folder / "results.jsonl")
    assert RUN["MARKED"].findall((folder / "README.md").read_text()) == [experiment["table"](rows)]
    assert (folder / "figure.svg").read_text().startswith("<svg") and experiment["figure"](rows).startswith("<svg")


def test_the_projects_page_has_every_answer():
    assert RUN["MARKED"].findall((ROOT / "README.md").read_text()) == [RUN["answers"]()]


def test_every_claim_has_a_verdict():
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs" / "claims.md").read_text(), flags=re.M)
    claims = [row for row in rows if row[0] not in ("claim", "---")]
    assert len(claims) >= 15
    for claim, verdict, known in claims:
        assert verdict in ("holds", "does not hold", "open"), claim
        if verdict != "open":
            assert "](" in known or "`tests/" in known, f"{claim}: a verdict without its evidence"


def test_commands_go_on_and_paths_go_by_a_name(tmp_path, monkeypatch):
    """The laboratory around the command line: variables, the folder, an exit that is passed on."""
    lab = RUN["Lab"]("a_test")
    monkeypatch.setattr(lab, "folder", tmp_path / "runs")
    monkeypatch.setitem(RUN["Lab"].start.__globals__, "ROOT", tmp_path)
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    with pytest.raises(SystemExit, match="FASTWEIGHTS_DATA does not name"):
        lab.start("a", "train --data $FASTWEIGHTS_DATA/x")
    with pytest.raises(SystemExit, match="2"):
        lab.fastweights("a", "report nothing.jsonl")
    monkeypatch.setenv("FASTWEIGHTS_DATA", "/somewhere/texts/")
    row = {"command": "fastweights train --data /somewhere/texts/a.parquet", "sessions": [{"command": "/somewhere/texts"}]}
    named = RUN["_named_by_variable"](row)
    assert named == {"command": "fastweights train --data $FASTWEIGHTS_DATA/a.parquet", "sessions": [{"command": "$FASTWEIGHTS_DATA"}]}
    with pytest.raises(SystemExit, match="004_none: experiments are 001_"):
        RUN["main"](["004_none"])


def test_chains_share_the_lanes_and_one_that_fails_ends_alone(tmp_path, monkeypatch):
    lab, began = RUN["Lab"]("a_test"), []

    def start(name, arguments):
        began.append(name)
        return subprocess.Popen([sys.executable, "-S", "-c", arguments])

    monkeypatch.setattr(lab, "start", start)
    first = f"import pathlib, time; time.sleep(0.2); pathlib.Path({str(tmp_path / 'there')!r}).touch()"
    after = f"import pathlib; assert pathlib.Path({str(tmp_path / 'there')!r}).exists()"
    chains = [[("a", first), ("a, measured", after)], [("b", "raise SystemExit(1)"), ("b, measured", "")], [("c", "")]]
    assert lab.together(chains, 2) == ["b"]
    assert began[:2] == ["a", "b"] and sorted(began) == ["a", "a, measured", "b", "c"]
    assert lab.place("a") == Path("runs/experiments/a_test/a")


class Reader:
    """A laboratory that reads commands as the command line does, up to where work would begin."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.calls = folder, []

        def compare(settings: TaskCompareSettings) -> None:
            self.calls.append((settings, plan_jobs(settings)))

        def train(settings: TrainingRun) -> None:
            self.calls.append((settings, FastWeightsConfig(**Variant.parse(settings.mixer).config(settings.model, vocab_size=258))))

        monkeypatch.setitem(cli.ON_TASK, "compare", compare)
        monkeypatch.setattr(cli, "train", train)

    def fastweights(self, name, arguments):
        assert cli.main([*shlex.split(arguments), "--out", str(self.folder / name)]) == 0

    def together(self, chains, lanes):
        """All of them are one command with other mixers and rates: reading the last one is enough."""
        names = [name for chain in chains for name, _ in chain]
        assert len(set(names)) == len(names)
        self.fastweights(*chains[-1][-1])
        return []


def experiment_of(number):
    return RUN["config"](next(folder for folder in FOLDERS if folder.name.startswith(number)))


def finished(job):
    """A row as a comparison leaves it."""
    measured = []
    for task in job.settings.evaluate:
        strata = [(None, None), ("seen", 0), ("seen", 1), ("covered", 0), ("covered", 1)]
        fixed = {"task": task.name, **task.parameters(), "chance": task.chance, "ceiling": task.ceiling}
        share = 0.5 + 0.1 * job.seed
        measured += [fixed | dict(stratum=s, value=v, asked=9, accuracy=share, low=share - 0.1, high=share + 0.1) for s, v in strata]
    known = dict(label=job.label, learning_rate=job.learning_rate, seed=job.seed, train_accuracy=0.5, state_floats=64, diverged=False)
    training = [[200, 2.0, 0.5, 1.0]]
    return dict.fromkeys((*KEPT, *ORIGIN), 1) | known | {"run": job.key, "accuracy": measured, "training": training}


@pytest.mark.parametrize("number", ["008", "009"])
def test_comparisons_on_tasks_are_understood_and_a_part_of_them_can_be_shown(number, tmp_path, monkeypatch):
    """An option that does not exist, or a page that only all rows together can fill, costs minutes of a card."""
    experiment, lab = experiment_of(number), Reader(tmp_path, monkeypatch)
    experiment["run"](lab)
    assert experiment["rows"](tmp_path) == []
    plans = [(settings, plan) for settings, plan in lab.calls if isinstance(settings, TaskCompareSettings)]
    for settings, jobs in plans:
        append_rows(settings.folder / "results.jsonl", [finished(job) for job in jobs])
    rows = experiment["rows"](tmp_path)
    assert len(rows) == sum(len(jobs) for _, jobs in plans)
    assert {row["n"] for row in rows} == {9 * len(settings.preset.evaluate) for settings, _ in plans}
    for part in (rows, rows[:1], rows[-1:], rows[len(rows) // 2 :]):
        assert re.search(r"[567]0\.0", experiment["answer"](part)), "an accuracy"
        assert experiment["table"](part).count("\n|") >= 2 and experiment["figure"](part).startswith("<svg")


@pytest.mark.parametrize("number, start", [("007", {1.0}), ("011", {1.0, 0.35, 0.1, 0.0}), ("012", {0.1})])
def test_trainings_on_text_are_understood(number, start, tmp_path, monkeypatch):
    experiment, lab, commands = experiment_of(number), Reader(tmp_path, monkeypatch), {}
    names = experiment["run"].__globals__
    grid = [(label, rate) for label in names["MIXERS"] for rate in names.get("RATES", ())]
    rates = [{"kind": "rate", "label": label, "learning_rate": rate, "bits_per_byte": {"value": rate}} for label, rate in grid]
    monkeypatch.setitem(names, "_rates", lambda folder: rates)
    monkeypatch.setattr(lab, "place", lambda name: tmp_path / name, raising=False)
    monkeypatch.setattr(lab, "together", lambda chains, lanes: commands.update(chain[0] for chain in chains))
    experiment["run"](lab)
    one_of_each = {re.search(r"--mixer (\S+)", arguments).group(1): arguments for arguments in commands.values()}
    for arguments in one_of_each.values():
        lab.fastweights("a", arguments)
    assert len(lab.calls) == len(one_of_each) >= len(names["MIXERS"])
    assert {config.out_proj_init for _, config in lab.calls} == start


def test_a_training_that_a_number_stopped_is_a_row_of_the_ablations(tmp_path):
    experiment = experiment_of("009")
    origin = dict.fromkeys(ORIGIN, 1)
    run = {"settings": {"train.learning_rate": 0.004}, "parameters": 5, "config": {"mixer": "kla", "num_hidden_layers": 1, "hidden_size": 8,
           "num_heads": 1, "expand_k": 1.0, "expand_v": 2.0, "vocab_size": 9, "intermediate_size": 0}}  # fmt: skip
    for name, session in (("kla", {}), ("no-key-norm", {"stopped": "step 61: the loss is nan; not finite: all. Checkpoints stay."})):
        folder = tmp_path / f"text-{name}-0.004"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(run | {"sessions": [origin, origin | session]}))
        append_rows(folder / "metrics.jsonl", [{"step": n, "loss": abs(n - 50) / 50, "grad_norm": n / 10} for n in range(5, 61, 5)])
    (tmp_path / "text-kla-0.004/result.json").write_text(json.dumps({"validation": {"bits_per_byte": {"value": 2.0}, "tokens": 7}}))
    kla, broken = rows = experiment["rows"](tmp_path)
    assert kla["n"] == 7 and kla["diverged"] is None and broken["n"] == 0 and broken["diverged"] == "step 61: the loss is nan"
    assert kla["state_floats"] == 8 * 16
    assert experiment["answer"](rows) == "on text no-key-norm at 0.004 ended in a number that is not finite"
    assert "| kla | 5 | 128 | 2.0000 | 5, 6 | 0.20 |" in experiment["table"](rows)
    assert "| no-key-norm | 5 | 128 | not finite at step 61 | 5, 6 | 0.20 |" in experiment["table"](rows)
