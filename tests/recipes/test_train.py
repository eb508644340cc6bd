import dataclasses
import functools
import importlib.util
import io
import json
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.recipes import train as recipe
from fastweights.recipes.folder import alone_in
from fastweights.recipes.settings import EvaluateSettings
from fastweights.recipes.train import plan_training, run_training
from fastweights.recipes.train_settings import TrainingRun, determining, flat
from fastweights.recipes.train_text import Mixture, Share, find_text
from fastweights.records import append_rows, read_rows
from fastweights.train import hub
from fastweights.train.presets import ModelSize, TrainSettings
from fastweights.train.tokenizer import byte_tokenizer

TRAIN = TrainSettings(steps=6, batch_tokens=64, sequence_length=16, save_every=4, log_every=1)
TIMED = {"seconds", "tokens_per_second", "memory"}


@pytest.fixture
def small(tmp_path, text, monkeypatch):
    """A run of a second; give what differs."""
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))

    def settings(folder="run", **changes):
        given = {
            "preset": "tiny",
            "model": ModelSize(hidden_size=32, num_hidden_layers=1, num_heads=2, intermediate_size=48),
            "data": (str(text),),
            "train": TRAIN,
            "evaluate": EvaluateSettings(validation_tokens=256, longest=4, length_tokens=128, prompt="the", sample_tokens=8),
            "tensorboard": False,
            "out": tmp_path / folder,
            "device": "cpu",
        }
        return TrainingRun(**given | changes)

    return settings


def run(settings):
    """(the result, what was printed)."""
    printed = io.StringIO()
    return run_training(plan_training(settings), Console(file=printed, width=200)), printed.getvalue()


def curve(folder):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in read_rows(folder / "metrics.jsonl")]


def test_a_run_leaves_a_folder_that_says_all(small, tmp_path):
    row, printed = run(small(export_dtype="bf16", tensorboard=True))
    folder = tmp_path / "run"
    assert f"{row['validation']['bits_per_byte']['value']:.3f}" in printed
    rows = read_rows(folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["tokens"] == 6 * 64
    assert {"loss", "grad_norm", "learning_rate", *TIMED, "layer00/beta_mean", "layer00/decay_min", "layer00/lambda_trace_max"} <= set(
        rows[0]
    )
    assert "mfu" not in rows[0]  # nobody told us this processor's peak
    assert list(folder.glob("runs/*/events*"))
    assert not list(folder.glob("checkpoint-*")) and not (folder / "model.part").exists()

    settings = json.loads((folder / "run.json").read_text())
    assert settings["settings"]["train.steps"] == 6 and settings["config"]["hidden_size"] == 32 and settings["sessions"][0]["commit"]
    assert json.loads((folder / "result.json").read_text()) == row and row["versions"]["torch"] == torch.__version__

    stored = load_file(folder / "model" / "model.safetensors")
    halves = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert "model.embed_tokens.weight" in halves and not any(".write." in name or ".read." in name or "norm" in name for name in halves)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ids = AutoTokenizer.from_pretrained(folder / "model")("the", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape == (1, 7)
    card = (folder / "model" / "README.md").read_text()
    for told in ("kla+ccq", f"{row['parameters']:,}", str(small().data[0]), "384 tokens", row["sample"]["text"].strip(), row["commit"]):
        assert told in card
    assert card.count("\n| ") == 1 + len(row["lengths"])  # a head, and a line a length


def test_two_at_once_in_one_folder_are_refused(small, tmp_path):
    """flock is of an opened file, so that one process can play both."""
    job = plan_training(small())
    with (
        alone_in(job.folder),
        pytest.raises(ValueError, match=r"another process is at work in .*run: wait"),
    ):
        run(small())
    assert not (tmp_path / "run/run.json").exists()


@pytest.mark.full
def test_a_run_of_fewer_steps_than_a_point_of_the_curve(small, tmp_path):
    row, _ = run(small(train=dataclasses.replace(small().train, steps=3, log_every=2, save_every=2)))
    assert [r["step"] for r in read_rows(tmp_path / "run/metrics.jsonl")] == [2, 3] and row["seconds"] > 0
    for damaged in ("", "[]", "{}", '{"settings": '):
        (tmp_path / "run/result.json").write_text(damaged)
        (tmp_path / "run/metrics.jsonl").unlink(missing_ok=True)
        again, _ = run(small(train=dataclasses.replace(small().train, steps=3, log_every=2, save_every=2)))
        assert again["validation"] == row["validation"] and again["seconds"] is None
    for damaged in ("", "[]", "{}", '{"identity": '):
        (tmp_path / "run/run.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"run\.json is damaged"):
            plan_training(small())


@pytest.mark.full
@pytest.mark.parametrize("text_of", ["files", "mixture"])
def test_interrupted_and_resumed_leaves_no_trace(small, tmp_path, monkeypatch, text, text_of):
    """By the same command, twice, between checkpoints too; and rows that a kill left behind its last checkpoint are not there twice."""
    if text_of == "mixture":
        (tmp_path / "dataset").mkdir()
        lines = [json.dumps({"text": f"page {i} of a book that nobody has read so far"}) + "\n" for i in range(60)]
        (tmp_path / "dataset/train.jsonl").write_text("".join(lines))
        monkeypatch.setattr(hub, "HELD_OUT", 20)
        small = functools.partial(small, data=(f"hub:{tmp_path / 'dataset'}:0.7", f"{text}:0.3"))
    straight, _ = run(small("straight"))
    for stop in (2, 5):

        def interrupt(file, rows, stop=stop):
            append_rows(file, rows)
            if rows[0]["step"] == stop - 1:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(recipe, "append_rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(small())
        assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")][-1] == stop
        assert (tmp_path / f"run/checkpoint-{stop}").exists() and not (tmp_path / "run/model").exists()
    monkeypatch.undo()
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    append_rows(tmp_path / "run/metrics.jsonl", [{"step": 6, "loss": 0.0}])
    resumed, printed = run(small())
    assert "Going on from" in printed and "checkpoint-5" in printed
    assert curve(tmp_path / "run") == curve(tmp_path / "straight")
    assert resumed["validation"] == straight["validation"] and resumed["sample"] == straight["sample"]
    assert len(resumed["sessions"]) == 3
    for name, tensor in load_file(tmp_path / "straight/model/model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "run/model/model.safetensors")[name]), name


@pytest.mark.full
def test_a_finished_run_is_only_told_of_and_other_measurements_only_measure(small, tmp_path):
    row, _ = run(small())
    written = (tmp_path / "run/model/model.safetensors").stat().st_mtime_ns
    again, printed = run(small())
    assert again == row and "Finished already" in printed
    longer = dataclasses.replace(small().evaluate, longest=8)
    measured, _ = run(small(evaluate=longer))
    assert len(measured["lengths"]) == 4 and len(row["lengths"]) == 3
    assert (tmp_path / "run/model/model.safetensors").stat().st_mtime_ns == written


def test_a_run_that_a_number_stopped_says_so(small, tmp_path, monkeypatch):
    def train(*arguments, **options):
        raise FloatingPointError("step 3: the loss is nan.\nThe text of the step:\na text")

    monkeypatch.setattr(recipe, "train", train)
    with pytest.raises(FloatingPointError, match="step 3"):
        run(small())
    (session,) = json.loads((tmp_path / "run/run.json").read_text())["sessions"]
    assert session["stopped"] == "step 3: the loss is nan." and session["commit"]


@pytest.mark.full
def test_a_folder_of_other_settings_is_refused_by_name_and_restart_removes_it(small, tmp_path, text):
    run(small())
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"train\.steps was 6, is 8.*--restart") as refusal:
        plan_training(small(train=dataclasses.replace(TRAIN, steps=8)))
    assert "mixer" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"mixer was 'kla\+ccq', is 'gla'; seed was 0, is 1"):
        plan_training(small(mixer="gla", seed=1))
    plan_training(small(train=dataclasses.replace(TRAIN, save_every=3, keep_checkpoints=5, spike=4.0), device="auto"))  # changes no weight
    text.write_text(text.read_text() + '{"text": "one more"}\n' * 9)
    with pytest.raises(ValueError, match="text was "):
        plan_training(small())
    row, _ = run(small(mixer="gla", restart=True))
    assert row["settings"]["mixer"] == "gla" and len(row["sessions"]) == 1 and len(curve(tmp_path / "run")) == 6
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_a_logger_that_is_not_installed_is_refused_before_any_work(small, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in ("wandb", "trackio") else real(name, *rest))
    for name in ("wandb", "trackio"):
        with pytest.raises(ValueError, match=f"{name} is not installed: pip install {name}"):
            plan_training(small(**{name: True}))
    assert not (tmp_path / "run").exists()


def test_what_may_change_is_no_part_of_a_run():
    names = determining(flat(TrainingRun()))
    assert {"mixer", "model.hidden_size", "train.steps", "train.log_every", "data", "seed", "preset"} <= set(names)
    assert not {"out", "device", "train.spike", "evaluate.longest", "wandb"} & set(names)
    assert json.loads(json.dumps(flat(TrainingRun()))) == flat(TrainingRun())


def test_shares_of_a_mixture(text, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HELD_OUT", 20)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/train.jsonl").write_text("".join(json.dumps({"text": f"page {i}"}) + "\n" for i in range(60)))
    page = f"hub:{tmp_path / 'dataset'}"
    assert (
        Share.parse("stdlib:0.2") == ("stdlib", 0.2) and Share.parse("hub:a/b:c") == ("hub:a/b:c", None) and Share.parse("x") == ("x", None)
    )

    find = functools.partial(find_text, tokenizer=byte_tokenizer(), name="bytes", seed=0)
    training, validation = find([f"{page}:3", f"{text}:1"], [])
    assert isinstance(training, Mixture) and list(training.open().weights) == [3.0, 1.0] and len(training.excluded) == 20
    of_file = find([str(text)], [])[1].open()
    assert len(validation.open()) == 20 + len(of_file)
    alone, _ = find([page], [str(text)])  # what is validated on lies apart, so nothing is held out
    assert isinstance(alone, Mixture) and alone.excluded == () and alone.key != training.key
    for data in ([f"{page}:1", str(text)], [f"{text}:0"], [f"{text}:-1"], [f"{text}:nan"]):
        with pytest.raises(ValueError, match="give a positive share to each source"):
            find(data, [])


def test_a_text_too_short_to_validate_on_is_refused_before_training(small, tmp_path):
    with pytest.raises(ValueError, match="the validation text is too short for longest=4096 windows"):
        plan_training(small(evaluate=EvaluateSettings(longest=4096)))


@pytest.mark.full
def test_fine_tuning_starts_from_the_model(small, tmp_path):
    run(small("base", train=dataclasses.replace(TRAIN, steps=40)))
    base = str(tmp_path / "base/model")
    row, _ = run(small("tuned", init_from=base, mixer="gla"))  # mixer and shape are the model's
    first = curve(tmp_path / "tuned")[0]["loss"]
    assert first < curve(tmp_path / "base")[0]["loss"] - 1
    assert row["mixer"] == "kla+ccq" and base in (tmp_path / "tuned/model/README.md").read_text()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # which peft 0.21 still asks for
def test_low_rank_adapters(small, tmp_path, monkeypatch):
    """Interrupted and resumed too: the rest of the weights is as it was, the folder is the base with the adapters merged."""
    peft = pytest.importorskip("peft")
    run(small("base"))
    base = str(tmp_path / "base/model")
    settings = small(init_from=base, lora_rank=2, train=dataclasses.replace(TRAIN, learning_rate=1e-2))
    straight, _ = run(dataclasses.replace(settings, out=tmp_path / "straight"))

    def interrupt(file, rows):
        append_rows(file, rows)
        if rows[0]["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(recipe, "append_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    monkeypatch.setattr(recipe, "append_rows", append_rows)
    row, _ = run(settings)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight") and row["validation"] == straight["validation"]

    before, after = (load_file(folder / "model/model.safetensors") for folder in (tmp_path / "base", tmp_path / "run"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"qkv_proj", "gate_proj", "out_proj", "up_proj", "down_proj"}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2
    ids = torch.arange(20)[None]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run/adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_need_a_model_to_adapt(small):
    with pytest.raises(ValueError, match="lora_rank=4 adapts a trained model: give init_from"):
        small(lora_rank=4)
    with pytest.raises(ValueError, match="lora_rank=-1 is negative"):
        small(lora_rank=-1)
    with pytest.raises(ValueError, match="adapters are trained with sharding='ddp'"):
        small(lora_rank=4, init_from="model", train=dataclasses.replace(TRAIN, sharding="fsdp2"))


def test_a_run_of_other_settings_is_refused_before_any_work(small, tmp_path):
    job = plan_training(small())
    recipe._write_settings(job)
    with pytest.raises(ValueError, match=r"holds a run of other settings: seed was 0, is 1\. Give another --out, or --restart"):
        plan_training(small(seed=1))
    plan_training(small(seed=1, restart=True))


def test_a_run_that_is_older_than_a_setting_goes_on(small, tmp_path):
    """It had the default."""
    recipe._write_settings(plan_training(small()))
    file = tmp_path / "run/run.json"
    written = json.loads(file.read_text())
    assert written["identity"].pop("train.carry_memory") is False
    file.write_text(json.dumps(written))
    plan_training(small())
    with pytest.raises(ValueError, match=r"train\.carry_memory was False, is True"):
        plan_training(small(train=dataclasses.replace(TRAIN, carry_memory=True)))


def test_the_same_text_by_another_path_is_the_same_run(small, text, tmp_path, monkeypatch):
    """From another folder, with a share, in an older run's relative words; a name that is no file is compared as it is."""
    monkeypatch.chdir(text.parent)
    here = dict(data=(f"./{text.name}",), validation=(text.name,))
    recipe._write_settings(plan_training(small(**here)))
    plan_training(small(data=(str(text),), validation=(str(text),)))
    file = tmp_path / "run/run.json"
    written = json.loads(file.read_text())
    assert written["identity"]["data"] == [str(text)] and written["identity"]["tokenizer"] == "bytes"
    written["identity"]["data"] = [text.name]
    file.write_text(json.dumps(written))
    plan_training(small(data=(str(text),), validation=(str(text),)))
    (text.parent / "stdlib").mkdir()
    names = {"data": [f"{text.name}:0.3", "stdlib:0.7", "hub:one/two"], "validation": [], "tokenizer": "bytes", "init_from": ""}
    assert recipe._by_place(names) == names | {"data": [f"{text}:0.3", "stdlib:0.7", "hub:one/two"]}


def test_memory_that_cannot_be_carried_is_refused_before_any_work(small, text, tmp_path):
    train = dataclasses.replace(TRAIN, carry_memory=True)
    for changes, message in [
        ({"mixer": "softmax"}, "softmax layers .* have no memory to hand on"),
        ({"data": (f"{text}:0.5", f"{text}:0.5")}, "lanes of streamed or mixed text"),
        ({"train": dataclasses.replace(train, batch_tokens=2**20)}, "do not fill one window of sequence_length=16 in each of 65536 lanes"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan_training(small(**{"train": train} | changes))
    assert not (tmp_path / "run").exists()
