import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights import cli
from fastweights.recipes.settings import CompareSettings


@pytest.fixture
def call(capsys):
    """Run the command in this process: (exit code, what it printed)."""

    def call(*arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


OF_TRAINING = ("--data", "--steps", "--learning-rate", "--hidden-size", "--longest", "--out", "--restart")
FLAGS = {
    "compare": ("--mixers", "--seeds", *OF_TRAINING),
    "demo": ("--mixers", "--seeds", *OF_TRAINING),
    "train": ("--preset", "--mixer ", "--seed ", *OF_TRAINING),
    "eval": ("--out", "--tasks", "--suite", "--text", "--lengths", "--data", "--limit", "--batch-size", "--max-length", "--restart"),
    "inspect": ("--device", "--layers", "--stride", "--needle", "--depth-map", "--lengths", "--depths", "--out"),
    "generate": ("--device", "--prompt", "--prompt-file", "--remember", "--load", "--save", "--speculate", "--temperature", "--stop"),
    "serve": ("--device", "--host", "--port", "--chat-template", "--precision"),
    "bench": ("--device", "--mixers", "--size", "--lengths", "--batches", "--repeats", "--bandwidth", "--precision", "--out"),
    "report": ("--export", "--out", "--title"),
}


def test_help_names_every_command_and_explains_every_setting(call):
    code, text = call("--help")
    assert code == 0 and all(name in text for name in cli.COMMANDS)
    for name, function in cli.COMMANDS.items():
        code, text = call(name, "--help")
        assert code == 0 and " ".join(function.__doc__.split())[:40] in " ".join(text.split())
        first, *_ = flags = FLAGS[name]
        assert all(flag in text for flag in flags)
        assert "None" not in text.split("--restart")[0].split(first)[-1]


def loaded_by(*arguments):
    """What a command has loaded of what is heavy."""
    code = "import sys\nfrom fastweights.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return {"torch", "transformers", "matplotlib", "datasets"} & set(done.stdout.split())


def test_help_and_a_misspelt_model_are_quick_because_nothing_heavy_is_loaded():
    for arguments in (("--help",), ("train", "--help"), ("generate", "nowhere", "--prompt", "x")):
        assert not loaded_by(*arguments)


def test_a_report_of_results_loads_no_model(tmp_path):
    results = Path(__file__).parent.parent / "benchmarks/results/demo.json"
    assert loaded_by("report", str(results), "--out", str(tmp_path / "page.html")) == {"matplotlib"}


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("compare", "--mixers", "kla+cqc"), "cqc"),
        (("compare", "--data", "no/such/folder"), "no file or folder 'no/such/folder'"),
        (("compare", "--sizes", "9b"), "size '9b' is not one of"),
        (("compare", "--steps", "0"), "steps=0 is not positive"),
        (("compare", "--tokenizer", "./no-such-tokenizer"), "no-such-tokenizer"),
        (("demo", "--precision", "fp8"), "fp8"),
        (("train", "--preset", "kla-9b"), "preset 'kla-9b' is not one of byte, kla-5m"),
        (("train", "--mixer", "kla+cqc"), "cqc"),
        (
            ("compare", "--train.steps", "3"),
            "compare has no option --train.steps; perhaps you meant --steps (fastweights compare --help has",
        ),
        (("train", "--evaluate.longst=3"), "train has no option --evaluate.longst; perhaps you meant --longest"),
        (("demo", "--nothing.like-it"), "demo has no option --nothing.like-it (fastweights demo --help has all)"),
        (("fly",), "fly"),
        ((), "compare"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_in_a_few_lines(call, monkeypatch, tmp_path, arguments, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    code, text = call(*arguments)
    assert code == 2 and told in text and "Traceback" not in text and len(text.splitlines()) <= 10
    assert not (tmp_path / "runs").exists()


def test_what_is_near_a_misspelt_option_is_one_of_the_same_command(call):
    code, text = call("train", "--mixers", "kla")
    assert code == 2 and "--mixer STR" in text and "bench" not in text and "compare" not in text
    code, text = call("eval", "m", "--learnin-rate", "3")
    assert code == 2 and "--learning-rate" not in text


@pytest.mark.parametrize(
    "package, extra", [("tyro", "cli"), ("rich", "cli"), ("accelerate", "train"), ("pyarrow", "train"), ("matplotlib", "report")]
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(call, monkeypatch, package, extra):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    code, text = call("demo")
    assert code == 2 and text == f"fastweights: this needs the extra '{extra}': pip install 'fastweights[{extra}]'\n"


def test_an_interrupt_has_its_own_exit_code(call, monkeypatch):
    def interrupted(settings: CompareSettings) -> None:
        """Stops."""
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "compare", interrupted)
    assert call("compare")[0] == 130


def test_the_demo_with_its_own_settings_made_small(call, monkeypatch, tmp_path):
    """The shipped command from the parser to the report: all four mixers on the standard library, in seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    small = "--steps 3 --batch-tokens 256 --sequence-length 64 --hidden-size 48 --num-hidden-layers 1 --intermediate-size 48"
    measure = "--validation-tokens 512 --length-tokens 1024 --sample-tokens 5 --processes 1 --device cpu --log-every 1"
    code, text = call("demo", *small.split(), *measure.split())
    assert code == 0
    for mixer in ("gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq"):
        assert mixer in text
    assert (tmp_path / "runs/demo/report.html").exists() and (tmp_path / "runs/demo/results.json").exists()


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_demo_as_shipped(tmp_path):
    """`make demo`, all of it: equal parameters, well under 3 bits per byte, context to 16 times the training length."""
    command = [sys.executable, "-c", "import sys; from fastweights.cli import main; sys.exit(main())", "demo", "--processes", "2"]
    environment = os.environ | {"FASTWEIGHTS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "runs/demo/results.json").read_text())
    assert [row["label"] for row in results["rows"]] == ["gated_deltanet", "kla", "gated_deltanet+ccq", "kla+ccq"]
    counts = [row["parameters"] for row in results["rows"]]
    assert max(counts) - min(counts) <= 0.005 * max(counts)
    for row in results["rows"]:
        assert row["validation"]["bits_per_byte"]["value"] < 2.6
        assert [point["length"] for point in row["lengths"]] == [256, 512, 1024, 2048, 4096]
        assert len(row["sample"]["text"]) > 100
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 100_000


def test_a_line_shows_where_it_came_from_if_asked(monkeypatch, capsys):
    """A ValueError of a library may be a fault of ours; whoever looks for it finds the place."""
    for wanted, seen in (("", False), ("1", True)):
        monkeypatch.setenv("FASTWEIGHTS_TRACEBACK", wanted)
        assert cli.main(["generate", "nowhere"]) == 2
        told = capsys.readouterr().err
        assert ("Traceback" in told) == seen and told.splitlines()[-1].startswith("fastweights: 'nowhere' is not the folder")
