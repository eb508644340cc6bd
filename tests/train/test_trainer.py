import dataclasses
import itertools
import json
import shutil

import pytest
import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train import packed_trainer
from fastweights.train.checkpoints import keep_newest, last_checkpoint
from fastweights.train.packed_trainer import CURVE, PackedTrainer, input_names
from fastweights.train.presets import SIZES, TrainSettings
from fastweights.train.trainer import train

SMALL = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 32}
SETTINGS = TrainSettings(steps=10, batch_tokens=64, sequence_length=16, save_every=100, log_every=1, learning_rate=1e-2, warmup=0.2)


@pytest.fixture
def run(corpus, llama, tmp_path):
    """Train a fresh tiny Llama; returns (training, model, the token rows fed, in order)."""

    def run(folder="run", *, stop_at=None, settings=SETTINGS, prepare=lambda model: None, **options):
        model, fed = llama(), []
        prepare(model)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"][0].tolist())) if module.training else None, with_kwargs=True
        )
        done = []
        training = train(
            model,
            corpus,
            settings,
            folder=tmp_path / folder,
            on_step=lambda step, logs: done.append(step),
            should_stop=lambda: done[-1] == stop_at,
            **options,
        )
        return training, model, fed

    return run


def losses(training):
    return [(entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in training.history]


def test_stopped_twice_and_resumed_is_the_straight_run(run, corpus):
    """The same tokens, losses and weights, bit for bit, at a stop within an epoch and after its end."""
    straight, model, fed = run("straight")
    assert straight.finished and len(fed) == 10 and corpus.total < 9 * 64  # more than an epoch
    parts = []
    for stop_at in (2, 9, None):
        training, resumed, tokens = run("stopped", stop_at=stop_at)
        assert training.finished == (stop_at is None)
        parts += tokens
    assert parts == fed
    assert losses(training) == losses(straight) and [step for step, *_ in losses(straight)] == [*range(1, 11)]
    for (name, a), (_, b) in zip(model.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    seconds = [entry["seconds"] for entry in training.history]
    assert seconds == sorted(seconds)
    # and a finished run is only loaded
    training, loaded, tokens = run("stopped")
    assert training.finished and not tokens and losses(training) == losses(straight)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_a_checkpoint_cut_short_by_a_kill_is_passed_over(run, tmp_path):
    straight, _, fed = run("straight")
    _, _, first = run("killed", stop_at=3)
    shutil.copytree(tmp_path / "killed/checkpoint-3", tmp_path / "killed/checkpoint-5")
    for half_written in ("", '{"global_step": 5, "epo'):
        (tmp_path / "killed/checkpoint-5").mkdir(exist_ok=True)
        (tmp_path / "killed/checkpoint-5/trainer_state.json").write_text(half_written)
        assert last_checkpoint(tmp_path / "killed") == str(tmp_path / "killed/checkpoint-3")
    training, _, rest = run("killed")
    assert first + rest == fed and losses(training) == losses(straight)


def test_pieces_of_a_step_give_the_gradient_of_the_whole(run):
    """At uneven numbers of targets in the pieces, for fp32 to rounding."""
    whole, a, fed = run("whole")
    settings = dataclasses.replace(SETTINGS, accumulation=4)
    pieces, b, parts = run("pieces", settings=settings)
    assert [sum((parts[4 * step + i] for i in range(4)), ()) for step in range(10)] == fed
    torch.testing.assert_close(torch.tensor(losses(pieces)), torch.tensor(losses(whole)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(b.named_parameters()), dict(a.named_parameters()), rtol=1e-3, atol=1e-4)


def test_the_schedule_is_a_warm_up_and_a_cosine(run):
    training, *_ = run()
    rates = [entry["learning_rate"] for entry in training.history]
    peak = max(rates)
    assert peak == pytest.approx(1e-2) and rates.index(peak) == 2 and rates[0] == 0.0  # logged before the step: 0, half, peak after 2 steps
    assert rates[2:] == sorted(rates[2:], reverse=True) and 1e-3 <= rates[-1] < 2e-3


def test_it_learns_and_bf16_keeps_float32_weights(run):
    settings = dataclasses.replace(SETTINGS, steps=40, precision="bf16", log_every=5)
    training, model, _ = run(settings=settings)
    assert training.history[-1]["loss"] < 0.8 * training.history[0]["loss"]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_first_number_that_is_not_finite_stops_the_run(run, tmp_path, corpus):
    def poison(model):
        def after_six_steps(module, args, output):
            module.calls = getattr(module, "calls", 0) + module.training
            return output * torch.inf if module.calls == 7 else output

        model.model.layers[1].mlp.register_forward_hook(after_six_steps)

    settings = dataclasses.replace(SETTINGS, save_every=5)
    with pytest.raises(FloatingPointError) as failure:
        run(settings=settings, prepare=poison)
    message = str(failure.value)
    assert message.startswith("step 7: the loss is nan; not finite: gradient of ")
    assert "epoch 0, window " in message and any(f"{name}[" in message for name in corpus.names)
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run/checkpoint-5")
    assert all(torch.isfinite(p).all() for p in run()[1].parameters())  # the same run goes on from there


def test_a_gradient_that_is_not_finite_reaches_no_weight(run, llama):
    models = []

    def poison(model):
        models.append(model)
        model.lm_head.weight.register_hook(lambda gradient: gradient / 0.0)

    with pytest.raises(FloatingPointError, match=r"step 1: the loss is 5\.\d+; not finite: gradient of lm_head\.weight\.\n"):
        run(prepare=poison)
    for (name, a), (_, b) in zip(models[0].named_parameters(), llama().named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_documents_of_a_row_do_not_see_each_other(corpus, llama, tmp_path):
    """The loss of a packed row is the mean over the documents run apart: for transformers' own attention too."""
    model = llama().eval()
    trainer = PackedTrainer(model, corpus, SETTINGS, folder=tmp_path, seed=0, device="cpu", log_to=(), quiet=True)
    row = next(iter(trainer.get_train_dataloader()))
    assert list(row) == input_names(model) == ["input_ids", "labels", "position_ids"]
    borders = trainer.batches[0]["cu_seqlens"].tolist()
    apart = torch.tensor(0.0)
    for begin, end in itertools.pairwise(borders):
        ids = row["input_ids"][:, begin:end]
        if end - begin > 1:
            apart = apart + model(input_ids=ids, labels=ids).loss * (end - begin - 1)
    targets = (row["labels"] != -100).sum()
    torch.testing.assert_close(model(**row).loss, apart / targets)


def test_settings_that_cannot_be_met():
    for bad, message in [
        (dict(steps=0), "steps=0 is not positive"),
        (dict(clip=-1.0), "clip=-1.0 is negative"),
        (dict(warmup=1.5), "warmup=1.5 is not a share"),
        (dict(sequence_length=1), "leaves nothing to predict"),
        (dict(batch_tokens=100, sequence_length=64), "batch_tokens=100 is not a whole number of windows of sequence_length=64"),
        (dict(accumulation=32), "in each of accumulation=32 pieces"),
        (dict(spike=0.5), "spike=0.5 is neither 0 nor above 1"),
        (dict(keep_checkpoints=0), "keep_checkpoints=0 is not positive"),
        (dict(compile=True, sharding="fsdp2"), "a model in shards is not compiled"),
        (dict(save_every=15), "save_every=15 is not a multiple of log_every=10"),
    ]:
        with pytest.raises(ValueError, match=message):
            TrainSettings(**bad)


def test_presets_are_plain_data():
    assert json.dumps({name: dataclasses.asdict(size) for name, size in SIZES.items()})
    for size in SIZES.values():
        assert size.hidden_size % size.num_heads == 0


@pytest.mark.full
def test_a_spike_stops_before_the_weights_take_it(run, tmp_path, llama):
    """At step 30 the loss is tenfold: in pieces, by their sum. The checkpoint before it stays, and without the guard it is trained on."""

    def poison(model):
        def once(module, args, output):
            model.calls = getattr(model, "calls", 0) + 1
            return output * 40 if model.calls in (59, 60) else output

        model.lm_head.register_forward_hook(once)

    settings = dataclasses.replace(SETTINGS, steps=32, save_every=10, accumulation=2, spike=2.0)
    with pytest.raises(FloatingPointError) as failure:
        run(settings=settings, prepare=poison)
    message = str(failure.value)
    assert (
        message.startswith("step 30: the loss is ") and "more than spike=2 times" in message and "median of the 29 steps before" in message
    )
    assert message.count("epoch ") == 2 * 2  # the text of both pieces, two windows each
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run/checkpoint-20")
    training, *_ = run("unguarded", settings=dataclasses.replace(settings, spike=0.0), prepare=poison)
    assert training.finished


def test_everything_is_logged_and_the_checkpoint_keeps_the_curve(run, tmp_path):
    logged = []
    training, *_ = run(on_log=logged.append)
    assert [row["step"] for row in logged] == [*range(1, 11)]
    assert all(row["tokens"] == row["step"] * 64 and row["tokens_per_second"] > 0 and row["memory"] > 10**7 for row in logged)
    assert training.history == [{name: row[name] for name in CURVE} for row in logged]
    state = json.loads((tmp_path / "run/checkpoint-10/trainer_state.json").read_text())
    assert [entry for entry in state["log_history"] if "loss" in entry] == training.history


def test_checkpoints_are_kept_by_number_and_what_a_user_made_is_left_alone(run, tmp_path):
    """Copies and notes beside them, older and newer, whole and not: neither resumed from nor removed, by saving, looking or leaving off."""
    mine = {"checkpoint-best", "checkpoint-4-copy", "checkpoint-notes.txt", "my-checkpoint-8"}
    for name in mine:
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/checkpoint-best/trainer_state.json").write_text('{"global_step": 99}')
    run(settings=dataclasses.replace(SETTINGS, save_every=2, keep_checkpoints=3))
    assert {path.name for path in (tmp_path / "run").glob("*checkpoint-*")} == mine | {"checkpoint-6", "checkpoint-8", "checkpoint-10"}
    assert last_checkpoint(tmp_path / "run") == str(tmp_path / "run/checkpoint-10")
    keep_newest(tmp_path / "run", 0)
    assert {path.name for path in (tmp_path / "run").glob("*checkpoint-*")} == mine
    assert last_checkpoint(tmp_path / "run") is None


@pytest.mark.full
def test_activation_checkpointing_changes_no_number(run):
    plain, a, _ = run("plain")
    again, b, _ = run("again", settings=dataclasses.replace(SETTINGS, activation_checkpointing=True))
    assert b.model.layers[0].gradient_checkpointing and losses(again) == losses(plain)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_large_logits_are_never_whole(corpus, tmp_path, monkeypatch):
    """The head is given 1,024 tokens at most, and the losses are those of whole logits."""
    model = lambda: FastWeightsForCausalLM(FastWeightsConfig(mixer="kla", **SMALL))  # noqa: E731
    settings = dataclasses.replace(SETTINGS, steps=3, batch_tokens=1600)
    curves = []
    for most in (2**26, 1):
        monkeypatch.setattr(packed_trainer, "WHOLE_LOGITS", most)
        torch.manual_seed(0)
        kla, seen = model(), []
        kla.lm_head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[..., 0].numel()))
        training = train(kla, corpus, settings, folder=tmp_path / str(most))
        curves.append([entry["loss"] for entry in training.history])
        assert max(seen) == (1600 if most > 1 else 1024)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of the compiler's and transformers' own, about this machine
def test_a_compiled_model_trains_alike(corpus, tmp_path):
    curves = []
    for compiled in (False, True):
        torch.manual_seed(0)
        kla = FastWeightsForCausalLM(FastWeightsConfig(mixer="kla", **SMALL))
        settings = dataclasses.replace(SETTINGS, steps=4, compile=compiled)
        curves.append([entry["loss"] for entry in train(kla, corpus, settings, folder=tmp_path / str(compiled)).history])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
