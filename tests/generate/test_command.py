"""`fastweights generate`: an answer, a memory saved and loaded, a conversation, and requests that cannot be met."""

import io
import json
import os
import signal
import threading

import pytest

from fastweights import cli
from fastweights.generate import Engine, Sampling, Snapshot
from fastweights.recipes.generate import prepare
from fastweights.recipes.generate_settings import GenerateSettings
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(mixer="kla+ccq", vocab_size=258, bos_token_id=256, eos_token_id=256).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def run(capfd):
    """Run the command here: (exit code, standard output, standard error)."""

    def run(*arguments):
        try:
            code = cli.main(["generate", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, *capfd.readouterr()

    return run


def expected(folder, *prompts, **arguments):
    """The answers to prompts in a row, each after all before, by the engine itself."""
    from fastweights.models import FastWeightsForCausalLM

    decoder, snapshot, texts = Engine(FastWeightsForCausalLM.from_pretrained(folder), byte_tokenizer(), rows=1), None, []
    for prompt in prompts:
        tokens = [*([] if snapshot else [256]), *prompt.encode()]
        answer = decoder.submit(tokens, Sampling(**arguments), after=snapshot, keep=True).result()
        texts.append(answer.text)
        snapshot = answer.snapshot
    return texts


def test_a_prompt_is_answered(run, folder, tmp_path):
    code, out, err = run(folder, "--prompt", "Hello", "--max-new-tokens", 20)
    assert code == 0 and out.rstrip("\n") == expected(folder, "Hello", max_new_tokens=20)[0].rstrip("\n")
    assert "20 tokens after 6 (of which 6 were read now)" in err and "ended by length" in err
    (tmp_path / "prompt.txt").write_text("Hello")
    assert run(folder, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 20, "--speculate", 3)[1] == out
    sampled = ("--prompt", "Hello", "--max-new-tokens", 20, "--temperature", 1.5, "--top-k", 50, "--seed", 3)
    assert run(folder, *sampled)[1] == run(folder, *sampled)[1] != out


def test_the_model_is_compiled_if_asked_for(folder):
    for compile in (False, True):
        writer = prepare(str(folder), GenerateSettings(prompt="Hello", prefill_chunk=8, device="cpu", compile=compile))
        assert writer.engine.passes.compiled is compile


def test_a_file_is_remembered_and_answered_from_at_once(run, folder, tmp_path):
    text = "What was said is remembered. " * 50
    (tmp_path / "book.txt").write_text(text)
    code, out, err = run(folder, "--remember", tmp_path / "book.txt", "--save", tmp_path / "mem.fw")
    assert code == 0 and out == "" and "1,451 tokens read" in err and "1,451 tokens remembered in" in err
    assert len(Snapshot.load(tmp_path / "mem.fw")) == 1451
    ask = ("--prompt", "And?", "--max-new-tokens", 15)
    code, out, err = run(folder, "--load", tmp_path / "mem.fw", *ask, "--save", tmp_path / "mem2.fw")
    assert code == 0 and out[:-1] == expected(folder, text + "And?", max_new_tokens=15)[0]
    assert "after 1,455 (of which 431 were read now)" in err  # 1,024 of them lie in whole chunks
    assert run(folder, "--remember", tmp_path / "book.txt", *ask)[1] == out
    assert len(Snapshot.load(tmp_path / "mem2.fw")) == 1455 + 15


def test_a_conversation_remembers(run, folder, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    code, out, err = run(folder, "--max-new-tokens", 8, "--save", tmp_path / "mem.fw")
    assert code == 0 and out == "".join(text + "\n" for text in expected(folder, "one\n", "two\n", "three\n", max_new_tokens=8))
    assert err.count("ended by length") == 3 and len(Snapshot.load(tmp_path / "mem.fw")) == 1 + 4 + 4 + 6 + 3 * 8


def test_ctrl_c_ends_the_answer_and_not_the_conversation(run, folder, monkeypatch):
    lines = iter(["one\n", "two\n", ""])

    class Keyboard(io.StringIO):
        def readline(self, *_):
            return next(lines)

    monkeypatch.setattr("sys.stdin", Keyboard())
    before = signal.getsignal(signal.SIGINT)
    timers = [threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in (1.0,)]
    join = Engine.submit

    def submit(self, *arguments, **keywords):
        request = join(self, *arguments, **keywords)
        if timers:
            timers.pop().start()
        else:
            request.sampling = Sampling(max_new_tokens=4)
        return request

    monkeypatch.setattr(Engine, "submit", submit)
    code, _, err = run(folder, "--max-new-tokens", 1_000_000, "--ignore-eos")
    assert code == 0 and "ended by cancelled" in err and "4 tokens after" in err and err.count("ended by") == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_that_was_interrupted_before_it_began_leaves_the_memory_as_it_was(run, folder, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    submit = Engine.submit

    def interrupted(self, prompt, *arguments, **keywords):
        request = submit(self, prompt, *arguments, **keywords)
        if prompt == list(b"two\n"):
            request.cancel()
        return request

    monkeypatch.setattr(Engine, "submit", interrupted)
    code, out, err = run(folder, "--max-new-tokens", 8, "--save", tmp_path / "mem.fw")
    one, three = expected(folder, "one\n", "three\n", max_new_tokens=8)
    assert code == 0 and out == f"{one}\n\n{three}\n" and err.count("ended by cancelled") == 1
    assert len(Snapshot.load(tmp_path / "mem.fw")) == 1 + 4 + 6 + 2 * 8


def test_a_line_that_is_no_text_and_an_answer_that_fails_cost_no_memory(run, folder, monkeypatch, tmp_path):
    lines = io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9\n"), encoding="utf-8")
    lines._CHUNK_SIZE = 1  # at a terminal, too, a line comes by itself
    monkeypatch.setattr("sys.stdin", lines)
    code, _, err = run(folder, "--max-new-tokens", 8, "--save", tmp_path / "mem.fw")
    assert code == 0 and "not text in UTF-8" in err and len(Snapshot.load(tmp_path / "mem.fw")) == 1 + 4 + 8

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    step, calls = Engine._decode, []

    def fails(self):
        calls.append(1)
        if len(calls) == 10:  # within the second answer
            self.rows.states[0].memory.fill_(float("nan"))
        step(self)

    monkeypatch.setattr(Engine, "_decode", fails)
    code, _, err = run(folder, "--max-new-tokens", 8, "--save", tmp_path / "mem.fw")
    assert code == 0 and err.count("the model failed on this request: the model gave logits that are not finite") == 1
    assert len(Snapshot.load(tmp_path / "mem.fw")) == 1 + 4 + 6 + 2 * 8


def test_the_name_of_a_special_token_in_a_text_is_text(run, folder, tmp_path):
    """As in training."""
    (tmp_path / "book.txt").write_text("<|document|>")
    _, _, err = run(folder, "--remember", tmp_path / "book.txt", "--save", tmp_path / "mem.fw")
    assert "13 tokens read" in err


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("{folder}", "--load", "{tmp}/none.fw", "--prompt", "x"), "there is no snapshot file"),
        (("{folder}", "--load", "{tmp}/text.fw", "--prompt", "x"), "not a whole safetensors file"),
        (("{folder}", "--load", "{tmp}/foreign.fw", "--prompt", "x"), "the snapshot is of another model: found 2 layers of gla"),
        (("{tmp}/nowhere", "--prompt", "x"), "is not the folder of a saved model: it has no config.json"),
        (("{tmp}/llama", "--prompt", "x"), "holds a model of type 'llama'"),
        (("{tmp}/broken", "--prompt", "x"), "is not a valid JSON file"),
        (("{tmp}/cut", "--prompt", "x"), "are damaged or do not fit its configuration"),
        (("{tmp}/deeper", "--prompt", "x"), "lack what its configuration asks for: model.layers.2.mixer.conv.weight and "),
        (("{folder}", "--prompt", "x", "--prompt-file", "y"), "give one"),
        (("{folder}", "--prompt-file", "{tmp}/none.txt"), "No such file"),
        (("{folder}", "--prompt-file", "{tmp}/latin.txt"), "is not text in UTF-8"),
        (("{folder}", "--prompt", "x", "--temperature", "-1"), "temperature=-1.0"),
        (("{folder}", "--prompt", "x", "--speculate", "2", "--temperature", "1"), "needs greedy decoding"),
        (("{folder}", "--prompt", "x", "--save", "{tmp}/no/mem.fw"), "there is no folder"),
        (("{folder}", "--prompt", "x", "--save", "{tmp}"), "is a folder; give the file to write"),
        (("{folder}", "--prompt", "half a \udcff character"), "cannot be written in UTF-8: surrogates not allowed, at character 7"),
        (("{folder}", "--prompt", "xxxx", "--max-context", "20"), "max_context=20"),
        (("{folder}", "--prompt", "x", "--prefill-chunk", "0"), "prefill_chunk=0"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(run, folder, tmp_path, arguments, told):
    (tmp_path / "text.fw").write_text("no snapshot")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    if "foreign.fw" in str(arguments):
        Engine(tiny_model(mixer="gla", vocab_size=258)).remember([1, 2]).save(tmp_path / "foreign.fw")
    for name, config in (("llama", json.dumps({"model_type": "llama"})), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "cut").mkdir()
    for file in folder.iterdir():
        (tmp_path / "cut" / file.name).write_bytes(file.read_bytes()[: 1000 if file.suffix == ".safetensors" else None])
    (tmp_path / "deeper").mkdir()
    for file in folder.iterdir():
        (tmp_path / "deeper" / file.name).write_bytes(file.read_bytes().replace(b'"num_hidden_layers": 2', b'"num_hidden_layers": 3'))
    code, out, err = run(*(argument.format(folder=folder, tmp=tmp_path) for argument in arguments))
    assert code == 2 and out == "" and told in err and "Traceback" not in err
    assert err.startswith("fastweights: ") and len(err.splitlines()) == 1
