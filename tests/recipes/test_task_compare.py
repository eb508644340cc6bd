"""The comparison on a task: training on fresh examples, the one way to stop early, resuming to the bit, standings, and what a user sees."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastweights import cli
from fastweights.evaluate.accuracy import accuracy
from fastweights.models import FastWeightsForCausalLM
from fastweights.recipes import task_job, task_presets
from fastweights.recipes.pool import finish
from fastweights.recipes.task_compare import plan_jobs, run_plan
from fastweights.recipes.task_examples import Asked
from fastweights.recipes.task_job import ask, learning_rate_factor, state_floats, train_on_task
from fastweights.recipes.task_presets import TASK_PRESETS, TaskSettings
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.recipes.task_standings import best_rates, standings
from fastweights.records import read_rows
from fastweights.report.tasks import axis_of
from fastweights.tasks import MQAR, Stack, generator
from fastweights.train.presets import ModelSize

EASY, HARDER = MQAR(length=16, pairs=2, vocab_size=16), MQAR(length=24, pairs=4, vocab_size=16)
SMALL = TaskSettings(
    train=((EASY, 3.0), (HARDER, 1.0)),
    evaluate=(EASY, HARDER),
    model=ModelSize(hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16),
    learning_rates=(1e-3, 1e-2),
    seeds=(0, 1),
    steps=6,
    batch_size=4,
    window=2,
    samples=8,
)
COMPARED = dict(mixers=("kla", "gated_deltanet+ccq"), processes=1)


def train(job, model=None, **told):
    return finish(train_on_task(job, job.model() if model is None else model, **told))


def test_the_loss_and_the_answers_are_the_models_own(job):
    model = job().model().train()
    for task in (HARDER, Stack(length=40, stacks=2, values=3)):  # with and without the same number of questions in each row
        batch = task.batch(5, generator(0))
        asked = Asked.of(batch)
        loss, right = ask(model, asked)
        output = model(input_ids=batch.input_ids, labels=batch.labels)
        torch.testing.assert_close(loss, output.loss)
        score = task.score(output.logits, batch)
        assert (int(right.sum()), int((asked.labels >= 0).sum())) == (score.total.correct, score.total.asked)


def test_examples_are_fresh_and_the_same_for_every_mixer(job, monkeypatch):
    seen = {}
    for label in ("kla", "gla"):
        fed = seen.setdefault(label, [])
        monkeypatch.setattr(task_job, "ask", lambda model, batch, fed=fed: fed.append(batch.tokens) or ask(model, batch))
        train(job(label=label))
    assert all(torch.equal(a, b) for a, b in zip(seen["kla"], seen["gla"], strict=True)) and len(seen["kla"]) == 6
    assert len({tuple(ids.flatten().tolist()) for ids in seen["kla"]}) == 6
    assert {ids.shape[1] for ids in seen["kla"]} == {16, 24}


def test_a_stopped_training_goes_on_to_the_same_bits(job):
    whole = job()
    straight = whole.model()
    uninterrupted = train(whole, straight)
    assert [point.step for point in uninterrupted.curve] == [2, 4, 6]
    whole.checkpoint.unlink()

    assert train(whole, should_stop=lambda: True) is None
    assert whole.checkpoint.exists()
    resumed = whole.model()
    trained = train(whole, resumed)
    assert [point[:3] for point in trained.curve] == [point[:3] for point in uninterrupted.curve]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    seconds = [point.seconds for point in trained.curve]
    assert seconds == sorted(seconds)


def test_a_checkpoint_of_an_older_form_goes_on_with_its_moments(job):
    whole, straight = job(), job().model()
    train(whole, straight)
    whole.checkpoint.unlink()
    train(whole, should_stop=lambda: True)
    kept = torch.load(whole.checkpoint, weights_only=True)
    torch.save(kept | {"optimizer": {"state": kept["optimizer"], "param_groups": []}}, whole.checkpoint)
    resumed = whole.model()
    train(whole, resumed)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_run_that_is_killed_loses_at_most_what_came_after_its_checkpoint(job, monkeypatch):
    monkeypatch.setattr(task_job, "CHECKPOINT_SECONDS", 0.0)

    def dies(phase, done, total, note):
        if done == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(job(), report=dies)
    told = []
    train(job(), report=lambda phase, done, *rest: told.append(done))
    assert told == [5, 6]


def scripted(answers):
    """An `ask` that gives scripted right answers, by length of the sequences, and lets the loss be what it is."""

    def ask_scripted(model, batch):
        loss, right = ask(model, batch)
        return loss, torch.full_like(right, answers[batch.tokens.shape[1]])

    return ask_scripted


def test_training_stops_early_only_when_every_task_is_solved(job, monkeypatch):
    monkeypatch.setattr(task_job, "ask", scripted({16: True, 24: False}))
    trained = train(job())
    assert trained.curve[-1].step == 6 and not trained.reached  # one task solved, the other at nothing: no plateau ends a run
    monkeypatch.setattr(task_job, "ask", scripted({16: True, 24: True}))
    longer = job(settings=dict(window=6, steps=60))
    trained = train(longer)
    assert trained.reached and trained.curve[-1].step == 6
    never = job(settings=dict(stop_at=None))
    assert train(never).curve[-1].step == 6


def test_a_task_that_has_not_come_up_is_not_solved(job, monkeypatch):
    monkeypatch.setattr(task_job, "ask", scripted({16: True, 24: True}))
    rare = job(settings=dict(train=((EASY, 1.0), (HARDER, 1e-12))))
    trained = train(rare)
    assert trained.curve[-1].step == 6 and not trained.reached and trained.curve[-1].accuracy == 1.0


def test_a_loss_that_is_not_finite_ends_the_run(job, monkeypatch):
    def broken(model, batch):
        loss, right = ask(model, batch)
        return loss * math.nan, right

    monkeypatch.setattr(task_job, "ask", broken)
    trained = train(job())
    assert trained.diverged and not trained.reached and trained.curve[-1].step == 2


def test_schedules_by_hand():
    cosine = dataclasses.replace(SMALL, schedule="cosine", steps=100, warmup=0.2)
    assert [learning_rate_factor(cosine, step) for step in (1, 10, 20, 60, 100)] == pytest.approx([0.05, 0.5, 1.0, 0.5, 0.0])
    constant = dataclasses.replace(SMALL, steps=100, warmup=0.1)
    assert [learning_rate_factor(constant, step) for step in (5, 10, 100)] == pytest.approx([0.5, 1.0, 1.0])
    assert learning_rate_factor(dataclasses.replace(SMALL, warmup=0.0), 1) == 1.0


def test_the_key_is_the_run_and_not_the_grid_around_it(job):
    key = job().key
    assert job(settings=dict(seeds=(0, 5), learning_rates=(1e-2, 5.0))).key == key
    others = [job(seed=1), job(label="kla+ccq"), job(learning_rate=2e-2), job(settings=dict(steps=7)), job(settings=dict(evaluate=(EASY,)))]
    assert len({key, *(other.key for other in others)}) == 6


def test_state_is_counted_with_ccqs_memory(job):
    plain, cleaned = state_floats(job(label="gla").model()), state_floats(job(label="gla+ccq").model())
    assert plain == 2 * 8 * 8 and cleaned == plain + 2 * (8 * 8 + 8 + 1)
    assert state_floats(job(label="softmax").model()) is None


def fake(label, rate, seed, trained, measured):
    rows = [
        dict(task="mqar", length=n, pairs=4, chance=0.1, ceiling=1.0, stratum=None, value=None, accuracy=a, low=a - 0.1, high=a + 0.1)
        for n, a in measured.items()
    ]
    facts = dict(parameters=10, state_floats=5, steps=100 + seed, training=[[1, 2.0, 0.5, 0.1]], train_accuracy=trained)
    return dict(label=label, learning_rate=rate, seed=seed, accuracy=rows, **facts)


def test_the_best_rate_is_chosen_in_training_and_seeds_are_joined():
    rows = [
        fake("kla", 1e-3, 0, 0.5, {64: 0.9, 128: 0.9}),  # better in the end, worse in training: not chosen
        fake("kla", 1e-2, 0, 0.9, {64: 0.8, 128: 0.2}),
        fake("kla", 1e-2, 1, 0.7, {64: 0.6, 128: 0.4}),
        fake("gla", 1e-3, 0, 0.3, {64: 0.3, 128: 0.1}),
    ]
    assert best_rates(rows) == {"kla": 1e-2, "gla": 1e-3}
    kla, gla = standings(rows)
    assert kla["seeds"] == [0, 1] and kla["steps"] == 100.5 and kla["train_accuracy"] == pytest.approx(0.8)
    assert [(m["evaluation"], round(m["accuracy"], 9), m["low"], m["high"]) for m in kla["accuracy"]] == [
        ("length 64, pairs 4", 0.7, 0.6, 0.8),
        ("length 128, pairs 4", 0.3, 0.2, 0.4),
    ]
    assert [(m["low"], m["high"]) for m in gla["accuracy"]] == [
        (pytest.approx(0.2), pytest.approx(0.4)),
        (pytest.approx(0.0), pytest.approx(0.2)),
    ]


def test_a_comparison_leaves_rows_results_and_a_report(compared, tmp_path):
    results, shown = compared()
    out = tmp_path / "out"
    rows = read_rows(out / "results.jsonl")
    assert len(rows) == 8 and {row["kind"] for row in rows} == {"task"}
    assert {(row["label"], row["learning_rate"], row["seed"]) for row in rows} == {
        (label, rate, seed) for label in ("kla", "gated_deltanet+ccq") for rate in (1e-3, 1e-2) for seed in (0, 1)
    }
    row = rows[0]
    assert {"command", "commit", "versions", "device", "time", "seed"} <= set(row) and row["preset"] == "small"
    assert [one["asked"] for one in row["accuracy"] if one["stratum"] is None] == [16, 32] and row["steps"] == 6
    assert json.loads((out / "results.json").read_text())["standings"] == json.loads(json.dumps(results["standings"]))
    assert "kla" in shown and "length 24, pairs 4" in shown and "mqar(length=16, pairs=2" in shown
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 3 and "Accuracy by length" in page and "gated_deltanet+ccq" in page and row["run"] in page
    assert not list(out.glob("*.pt"))


def test_trained_models_are_left_where_they_are_asked_for(compared, tmp_path):
    results, _ = compared(seeds=(0,), learning_rates=(1e-2,), save_models=True)
    folders = sorted((tmp_path / "out/models").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == ["gated_deltanet+ccq-lr0.01-seed0", "kla-lr0.01-seed0"]
    kla = FastWeightsForCausalLM.from_pretrained(folders[1])
    again = [row for row in accuracy(kla, SMALL.evaluate, samples=SMALL.samples)]
    assert json.loads(json.dumps(again)) == next(row["accuracy"] for row in results["rows"] if row["label"] == "kla")


def test_what_is_finished_is_not_done_again_and_restart_does_it_again(compared, monkeypatch):
    first, _ = compared(seeds=(0,), learning_rates=(1e-2,))
    trained = []
    monkeypatch.setattr(task_job, "train_on_task", lambda job, *rest, **more: trained.append(job.name) or train_on_task(job, *rest, **more))
    again, shown = compared(seeds=(0,), learning_rates=(1e-2,))
    assert trained == [] and again["standings"] == first["standings"] and "2 of them finished already" in shown
    compared(seeds=(0, 1), learning_rates=(1e-2,))
    assert trained == ["kla lr 0.01 seed 1", "gated_deltanet+ccq lr 0.01 seed 1"]
    fresh, _ = compared(seeds=(0,), learning_rates=(1e-2,), restart=True)
    assert len(trained) == 4
    assert [s["accuracy"] for s in fresh["standings"]] == [s["accuracy"] for s in first["standings"]]


def test_an_interrupted_measurement_does_not_train_again(job):
    interrupted = job()
    stopped = False

    def report(phase, done, total, note):
        nonlocal stopped
        if phase == "measuring" and not stopped:
            stopped = True
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(report, lambda: False)
    assert interrupted.checkpoint.exists()
    assert interrupted.run(lambda *told: None, lambda: True) is None  # asked to stop after a measurement
    told = []
    row = interrupted.run(lambda phase, *rest: told.append(phase), lambda: False)
    assert row["steps"] == 6 and "training" not in told and not interrupted.checkpoint.exists()


@pytest.mark.parametrize("preset", sorted(TASK_PRESETS))
def test_every_preset_can_be_run_and_is_documented(preset):
    settings = TASK_PRESETS[preset]
    jobs = plan_jobs(TaskCompareSettings(task=preset, mixers=("kla+ccq",), device="cpu"))
    assert len(jobs) == len(settings.learning_rates) * len(settings.seeds)
    tasks = [*(task for task, _ in settings.train), *settings.evaluate]
    assert all(task.vocab_size <= settings.vocab_size for task in tasks)
    measured = [task.parameters() for task in settings.evaluate]
    axis = axis_of(measured)
    assert len({one[axis] for one in measured}) == len(measured)  # the report's figure has one point for each
    documented = Path(__file__, "../../../docs/tasks.md").resolve().read_text()
    head, _, tail = preset.partition("zoology")
    assert f"`{preset}`" in documented or (head == "mqar-" and f"`{tail}`" in documented)
    assert preset in TaskCompareSettings.__dataclass_fields__ or preset in Path(task_presets.__file__).read_text()


def test_impossible_settings_are_refused():
    for changes, message in [
        (dict(train=()), "train is empty"),
        (dict(seeds=()), "seeds is empty"),
        (dict(steps=0), "steps is 0"),
        (dict(learning_rates=(0.0,)), "it must be positive"),
        (dict(schedule="linear"), "constant or cosine"),
        (dict(precision="fp8"), "fp32, tf32 or bf16"),
        (dict(warmup=2.0), "0 to 1"),
        (dict(stop_at=1.5), "share of the ceiling"),
    ]:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, **changes)
    for changes, message in [
        (dict(task="mqra"), "'mqra' is not one of mqar, "),
        (dict(task="mqar", mixers=("kla", "kla")), "none twice"),
        (dict(task="mqar", processes=-1), "negative"),
        (dict(task="mqar", steps=0), "steps is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            TaskCompareSettings(**changes)
    with pytest.raises(ValueError, match="klaa"):
        plan_jobs(TaskCompareSettings(task="mqar", mixers=("klaa",), device="cpu"))


def test_settings_replace_the_presets():
    settings = TaskCompareSettings(task="mqar", steps=7, seeds=(3, 4), hidden_size=32, intermediate_size=0, learning_rates=(0.5,))
    preset = settings.preset
    assert (preset.steps, preset.seeds, preset.learning_rates) == (7, (3, 4), (0.5,))
    assert preset.model == dataclasses.replace(TASK_PRESETS["mqar"].model, hidden_size=32, intermediate_size=0)
    assert settings.folder == Path("runs/mqar")


def test_the_command_line(compared, tmp_path, capsys):
    arguments = ["compare", "--task", "small", "--mixers", "kla", "--seeds", "0", "--learning-rates", "0.01", "--device", "cpu"]
    assert cli.main([*arguments, "--processes", "1", "--out", str(tmp_path / "cli")]) == 0
    assert "Report:" in capsys.readouterr().out and (tmp_path / "cli/report.html").exists()
    assert cli.main([*arguments[:4], "klaa"]) == 2
    assert "klaa" in capsys.readouterr().err


def test_help_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        cli.main(["compare", "--task", "mqar", "--help"])
    shown = "".join(capsys.readouterr().out.split())
    assert all(preset in shown for preset in TASK_PRESETS)


def test_options_and_patterns_reach_the_model(job):
    model = job(label="kla,softmax:eta_max=2", settings=dict(model=dataclasses.replace(SMALL.model, num_hidden_layers=2))).model()
    assert isinstance(model, FastWeightsForCausalLM) and model.config.eta_max == 2


def test_a_mixer_may_come_with_a_shape_of_its_own(job):
    plain, wide = (job(label=label).run(lambda *told: None, lambda: False) for label in ("kla", "kla:expand_v=4"))
    assert wide["model"] == plain["model"] | {"expand_v": 4} and wide["state_floats"] == 4 * plain["state_floats"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_mqar_is_learned_in_minutes(tmp_path):
    """The promise of the README: ≥ 99 % at length 64 with 4 pairs, for gated_deltanet and kla, on two cores."""
    settings = TaskCompareSettings(task="mqar", mixers=("gated_deltanet", "kla"), out=tmp_path, device="cpu", processes=2)
    results = run_plan(settings, plan_jobs(settings), Console(file=io.StringIO()))
    for standing in results["standings"]:
        assert standing["accuracy"][0]["evaluation"] == "length 64, pairs 4" and standing["accuracy"][0]["accuracy"] >= 0.99, standing
    assert sum(row["seconds"] for row in results["rows"]) / 2 < 600 or max(row["seconds"] for row in results["rows"]) < 600
