"""`fastweights serve`: requests that cannot be met, the layout of a conversation, pipelines, and the server with OpenAI's own client."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from fastweights import cli
from fastweights.models import FastWeightsForCausalLM
from fastweights.recipes.serve_settings import CHAT_TEMPLATE
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "Why?"},
]
LAID_OUT = "Be brief.\nWho?\nMe.\nWhy?\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that writes ASCII for ever: bytes that are no text would be told apart by where a stream is cut."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model = tiny_model(mixer="kla+ccq", vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257)
    model.generation_config.suppress_tokens = list(range(128, 258))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def run(capfd):
    """Run the command here: (exit code, all that it printed)."""

    def run(*arguments):
        try:
            code = cli.main(["serve", *map(str, arguments)])
        except SystemExit as exit:
            code = exit.code
        return code, "".join(capfd.readouterr())

    return run


def answer(folder, text, tokens, document=True):
    """What the model writes greedily after the document token and ``text``."""
    model = FastWeightsForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*([256] if document else []), *text.encode()]])
    return bytes(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()).decode()


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("{tmp}/nowhere",), "is not the folder of a saved model: it has no config.json"),
        (("{tmp}/llama",), "holds a model of type 'llama'"),
        (("{tmp}/broken",), "is not a valid JSON file"),
        (("{folder}", "--port", "0"), "port=0 is not from 1 to 65535"),
        (("{folder}", "--port", "{taken}"), "cannot listen on localhost:{taken}: Address already in use"),
        (("{folder}", "--host", "300.0.0.1"), "cannot listen on 300.0.0.1:8000"),
        (("{folder}", "--chat-template", "{tmp}/none.jinja"), "none.jinja: No such file"),
        (("{folder}", "--chat-template", "{tmp}/bad.jinja"), "is no chat template"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_before_the_model_is_loaded(run, folder, tmp_path, monkeypatch, arguments, told):
    look = FastWeightsForCausalLM.from_pretrained
    monkeypatch.setattr(
        FastWeightsForCausalLM,
        "from_pretrained",
        lambda *a, **how: look(*a, **how) if how["device_map"] == "meta" else pytest.fail("loaded"),
    )
    (tmp_path / "bad.jinja").write_text("{% for %}")
    for name, config in (("llama", json.dumps({"model_type": "llama"})), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        byte_tokenizer().save_pretrained(tmp_path / name)
    with socket.create_server(("localhost", 0)) as taken:
        names = {"folder": folder, "tmp": tmp_path, "taken": taken.getsockname()[1]}
        code, text = run(*(argument.format(**names) for argument in arguments))
    assert code == 2 and told.format(**names) in text and "Traceback" not in text


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "pydantic", "openai"])
def test_a_missing_extra_is_one_line(run, folder, monkeypatch, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    assert run(folder) == (2, "fastweights: this needs the extra 'serve': pip install 'fastweights[serve]'\n")


def test_a_base_model_is_told_what_was_said_and_a_template_of_its_own_is_kept(folder, tmp_path):
    from fastweights.recipes.serve import ServeSettings, prepare

    free = {"port": free_port()}
    given = json.loads(prepare(str(folder), ServeSettings(**free))["chat_template_kwargs"])
    laid_out = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **given)
    assert laid_out == [256, *LAID_OUT.encode()]

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    tokenizer.save_pretrained(tmp_path)
    assert json.loads(prepare(str(tmp_path), ServeSettings(**free))["chat_template_kwargs"]) == {}
    (tmp_path / "other.jinja").write_text("{{ messages | length }}")
    chosen = prepare(str(tmp_path), ServeSettings(chat_template=tmp_path / "other.jinja", **free))
    assert json.loads(chosen["chat_template_kwargs"]) == {"chat_template": "{{ messages | length }}"}


@pytest.mark.full
def test_pipelines_take_the_folder(folder):
    pipeline = transformers.pipeline("text-generation", str(folder), device="cpu")
    how = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    texts = [output[0]["generated_text"] for output in pipeline(["Hello", "To be or not"], batch_size=2, **how)]
    assert texts == [answer(folder, text, 12, document=False) for text in ("Hello", "To be or not")]
    pipeline.tokenizer.chat_template = CHAT_TEMPLATE
    assert pipeline(MESSAGES, **how)[0]["generated_text"] == answer(folder, LAID_OUT, 12)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def server(folder):
    """(a client, the process) of a server on a free port."""
    import openai

    port = free_port()
    code = "import sys; from fastweights.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            for _ in range(240):
                assert process.poll() is None, process.stdout.read().decode()
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    time.sleep(0.5)
            yield client, process
        finally:
            client.close()
            process.kill()
            process.stdout.close()


def ask(client, folder, text="Who?", **how):
    return client.chat.completions.create(model=str(folder), messages=[{"role": "user", "content": text}], **how)


@pytest.mark.full
def test_openais_client_gets_the_models_own_answer(server, folder):
    client, _ = server
    assert [model.id for model in client.models.list()] == [str(folder)]
    done = client.chat.completions.create(model=str(folder), messages=MESSAGES, max_tokens=20, temperature=0)
    assert done.choices[0].message.content == answer(folder, LAID_OUT, 20) and done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1 + len(LAID_OUT), 20)
    plain = client.completions.create(model=str(folder), prompt="To be", max_tokens=20, temperature=0)
    assert plain.choices[0].text == answer(folder, "To be", 20, document=False)


@pytest.mark.full
def test_streams_say_the_same_piece_by_piece(server, folder):
    client, _ = server
    chunks = list(ask(client, folder, max_tokens=20, temperature=0, stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert len(pieces) > 10 and "".join(pieces) == answer(folder, "Who?\n", 20) and chunks[-1].choices[0].finish_reason == "length"
    texts = [
        chunk.choices[0].text
        for chunk in client.completions.create(model=str(folder), prompt="To", max_tokens=9, temperature=0, stream=True)
    ]
    assert "".join(texts) == answer(folder, "To", 9, document=False)


@pytest.mark.full
def test_temperature_and_seed_are_heeded(server, folder):
    client, _ = server
    said = [ask(client, folder, max_tokens=20, temperature=1.0, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2] and answer(folder, "Who?\n", 20) not in said
    assert ask(client, folder, max_tokens=20, seed=1).choices[0].message.content == said[0]  # 1 is what a request without one means


@pytest.mark.full
def test_a_bad_request_is_told_why_and_the_server_lives_on(server, folder):
    import openai

    client, _ = server
    bad = [
        (lambda: client.chat.completions.create(model="another", messages=MESSAGES), openai.BadRequestError, "requested 'another'"),
        (lambda: ask(client, folder, extra_body={"nonsense": 1}), openai.UnprocessableEntityError, "nonsense"),
        (lambda: ask(client, folder, temperature=-1), openai.BadRequestError, "temperature"),
        (lambda: client.completions.create(model=str(folder), prompt=""), openai.BadRequestError, "the prompt is empty"),
        (lambda: client.completions.create(model=str(folder), prompt=[1, 2]), openai.BadRequestError, "prompt must be a string"),
        (lambda: list(ask(client, folder, temperature=-1, stream=True)), openai.APIError, "temperature"),
    ]
    right = answer(folder, "Who?\n", 8)
    for call, error, told in bad:
        with pytest.raises(error) as raised:
            call()
        assert told in str(raised.value.body or raised.value)
        assert ask(client, folder, max_tokens=8, temperature=0).choices[0].message.content == right


@pytest.mark.full
def test_a_client_that_leaves_and_many_at_once(server, folder):
    client, _ = server
    with ask(client, folder, max_tokens=1_000_000, temperature=0, stream=True) as stream:
        for _ in range(5):
            next(stream)
    words = [f"word {i}" for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda word: ask(client, folder, word, max_tokens=12, temperature=0).choices[0].message.content, words))
    assert said == [answer(folder, word + "\n", 12) for word in words]


@pytest.mark.full
def test_ctrl_c_ends_it(server):
    _, process = server  # the last test of this file: the server is not there for another
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
