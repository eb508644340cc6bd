"""A snapshot is the text: what follows is what follows the text itself, bit for bit, in memory and from a file. Bad files are refused."""

import json
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from fastweights.generate import Engine, Snapshot
from fastweights.generate.prefixes import Prefixes
from fastweights.models.cache import map_state
from tests.generate.common import KINDS, assert_greedy, engine, greedy, model, prompt, text_engine
from tests.layers.mixers import tensors_of
from tests.models.tiny import kinds, tiny_model


def bits(snapshot):
    return [x for state in snapshot.states for x in tensors_of(state)]


def assert_equal_states(one, other):
    assert len(one) == len(other) and one.read == other.read and one.pending == other.pending
    assert all(map(torch.equal, bits(one), bits(other))) and torch.equal(one.seen, other.seen)


@pytest.mark.parametrize("kind", kinds(KINDS, quick=("hybrid",)))
@pytest.mark.parametrize("length", [1, pytest.param(5, marks=pytest.mark.full), 13])
def test_two_ways_on_are_two_whole_texts_bit_for_bit(kind, length, tmp_path):
    decoder, text = engine(kind), prompt(length)
    decoder.remember(text).save(tmp_path / "memory.fw")
    for snapshot in (decoder.remember(text), Snapshot.load(tmp_path / "memory.fw")):
        before = [x.clone() for x in bits(snapshot)]
        for way in (prompt(4), prompt(9), []):
            branch = decoder.submit(way, greedy(8), after=snapshot, keep=True).result()
            whole = decoder.submit([*text, *way], greedy(8), keep=True).result()
            assert branch.tokens == whole.tokens and branch.prompt_tokens == whole.prompt_tokens
            assert_equal_states(branch.snapshot, whole.snapshot)
            assert branch.reused_tokens == (length - 1) // 5 * 5
        assert all(map(torch.equal, bits(snapshot), before)), "a snapshot was written into"


@settings(max_examples=6, deadline=None)
@given(parts=st.lists(st.integers(1, 17), min_size=1, max_size=5), chunk=st.integers(1, 12))
def test_remembering_in_parts_is_remembering_at_once(parts, chunk):
    decoder, text, snapshot, at = engine(prefill_chunk=chunk), prompt(sum(parts)), None, 0
    for length in parts:
        snapshot = decoder.remember(text[at : at + length], after=snapshot)
        at += length
    assert_equal_states(snapshot, decoder.remember(text))
    assert len(snapshot) == at and snapshot.read % chunk == 0


def test_a_conversation_goes_on_from_answers():
    """Turn after turn from the kept memory; the same as one text, prompts and answers in a row."""
    decoder, said, snapshot = engine(), [], None
    for turn in (prompt(6), prompt(3), prompt(11)):
        said += turn
        answer = decoder.submit(turn, greedy(7), after=snapshot, keep=True).result()
        assert_greedy(model(), said, answer, 7)
        said += answer.tokens
        snapshot = answer.snapshot
        assert len(snapshot) == len(said) and snapshot.seen.nonzero().flatten().tolist() == sorted(set(said))


def test_kept_after_a_cancelled_answer():
    decoder = engine()
    request = decoder.submit(prompt(6), greedy(90), keep=True)
    for _ in range(5):
        decoder.step()
    request.cancel()
    answer = request.result()
    assert answer.finish_reason == "cancelled" and len(answer.snapshot) == 6 + len(answer.tokens)
    assert_greedy(model(), [*prompt(6), *answer.tokens], decoder.submit([], greedy(5), after=answer.snapshot).result(), 5)


def test_progress_is_told():
    told = []
    engine().remember(prompt(13), on_progress=lambda done, total: told.append((done, total)))
    assert told == [(5, 13), (10, 13), (13, 13)]


def test_a_file_keeps_everything(tmp_path):
    decoder = engine("hybrid")
    snapshot = decoder.remember(prompt(23))
    snapshot.save(tmp_path / "memory.fw")
    again = Snapshot.load(tmp_path / "memory.fw")
    assert_equal_states(again, snapshot)
    assert again.fingerprint == snapshot.fingerprint == decoder.fingerprint and again.model == snapshot.model
    with safe_open(tmp_path / "memory.fw", "pt") as file:
        assert file.metadata()["format"] == "fastweights snapshot" and file.metadata()["format_version"] == "1"
    for name, length in (("short.fw", 23), ("long.fw", 2323)):
        engine(max_context=None, prefill_chunk=100).remember(prompt(length)).save(tmp_path / name)
    assert abs((tmp_path / "long.fw").stat().st_size - (tmp_path / "short.fw").stat().st_size) < 100, "a memory does not grow"


def test_saving_replaces_the_file_at_once_or_not_at_all(tmp_path, monkeypatch):
    import os

    snapshot, path = engine().remember(prompt(7)), tmp_path / "memory.fw"
    path.write_text("old")

    def fails(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "fsync", fails)
        snapshot.save(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["memory.fw"]
    snapshot.save(path)
    assert len(Snapshot.load(path)) == 7 and [p.name for p in tmp_path.iterdir()] == ["memory.fw"]


def test_another_models_snapshot_is_refused(tmp_path):
    snapshot = engine().remember(prompt(7))
    other = tiny_model(seed=1, mixer="kla+ccq")
    for model_, told in ((other, "2 layers of kla\\+ccq"), (model("gla"), "expected 2 layers of gla")):
        decoder = Engine(model_)
        with pytest.raises(ValueError, match=f"of another model: found 2 layers of kla\\+ccq.*{told}"):
            decoder.submit([1], greedy(3), after=snapshot)
        with pytest.raises(ValueError, match="of another model"):
            decoder.remember([1], after=snapshot)
    same = tiny_model(mixer="kla+ccq")
    assert Engine(same).submit([1], greedy(3), after=snapshot).result().finish_reason == "length"
    assert Engine(tiny_model(mixer="kla+ccq", backend="torch", eos_token_id=3)).fingerprint == snapshot.fingerprint
    for arguments in ({"norm_eps": 1e-4}, {"eta_max": 1.5}, {"ccq_strength": "learned"}):
        assert Engine(tiny_model(mixer="kla+ccq", **arguments)).fingerprint != snapshot.fingerprint
    with torch.no_grad():
        next(same.parameters())[0, 0] += 1e-3
    assert Engine(same).fingerprint != snapshot.fingerprint


def rewritten(path, out, **changes):
    """The same tensors, other metadata."""
    with safe_open(path, "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, out, {k: v for k, v in (about | changes).items() if v is not None})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "memory.fw"
    engine().remember(prompt(13)).save(path)
    return path


def test_other_files_and_versions_are_refused(saved, tmp_path):
    path = tmp_path / "other.fw"
    with pytest.raises(FileNotFoundError, match=r"no snapshot file .*other\.fw"):
        Snapshot.load(path)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="not a snapshot: its metadata says format=None, expected 'fastweights snapshot'"):
        Snapshot.load(path)
    rewritten(saved, path, format="pt")
    with pytest.raises(ValueError, match="format='pt'"):
        Snapshot.load(path)
    rewritten(saved, path, format_version="2")
    with pytest.raises(ValueError, match="format version '2'; this fastweights reads version '1'"):
        Snapshot.load(path)
    for change in ({"tokens_read": "5"}, {"fingerprint": "0" * 64}, {"content": None}, {"model": "another"}):
        rewritten(saved, path, **change)
        with pytest.raises(ValueError, match="is damaged: its content has the hash"):
            Snapshot.load(path)
    for content in (b"", b"hello", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            Snapshot.load(path)


def test_every_damage_is_seen(saved, tmp_path):
    """Cut anywhere, or with any byte of the header or a sample of the others changed, the file is refused."""
    content, path = saved.read_bytes(), tmp_path / "damaged.fw"
    header = 8 + struct.unpack("<Q", content[:8])[0]
    assert json.loads(content[8:header])["__metadata__"]
    for length in [0, 7, 8, 9, header - 1, header, header + 1, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="safetensors"):
            Snapshot.load(path)
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match="safetensors"):
        Snapshot.load(path)
    padding = header - len(content[8:header].rstrip())
    for at in [*range(0, header - padding % 8, 3), *range(header, len(content), 997), len(content) - 1]:
        changed = bytearray(content)
        changed[at] ^= 0x15
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"damaged|not a snapshot|format version"):
            Snapshot.load(path)
    shutil.copy(saved, path)
    assert len(Snapshot.load(path)) == 13


@pytest.mark.parametrize("kind", kinds(("kla+ccq", "hybrid"), quick=("kla+ccq",)))
def test_prompts_begin_where_earlier_ones_have_been(kind):
    decoder = engine(kind, prefixes=8)
    system = prompt(17)
    first = decoder.submit([*system, *prompt(4)], greedy(6)).result()
    assert first.reused_tokens == 0
    again = decoder.submit([*system, *prompt(4), 5], greedy(6)).result()
    assert again.reused_tokens == 20, "all but the token that was never read: the first answer's first token stood there"
    follow = [*system, *prompt(4), *first.tokens]
    further = decoder.submit([*follow, 7], greedy(6)).result()
    assert further.reused_tokens == len(follow) - 1, "the answer too"
    for p, answer in (([*system, *prompt(4), 5], again), ([*follow, 7], further)):
        assert_greedy(model(kind), p, answer, 6)
    decoder.remember(system)
    other = decoder.submit([*system, 3, 3], greedy(6)).result()
    assert other.reused_tokens == 16
    assert_greedy(model(kind), [*system, 3, 3], other, 6)
    assert decoder.submit(prompt(9), greedy(6)).result().reused_tokens == 0 and len(decoder.prefixes) == 8
    assert engine(kind).submit(system, greedy(6)).result().reused_tokens == 0


def test_the_longest_beginning_is_found_and_the_oldest_goes():
    kept = Prefixes(3)
    states = {n: [object()] for n in range(9)}
    for n in (2, 4, 6):
        kept.put(range(n), states[n])
    assert kept.longest(list(range(9))).states is states[6]
    assert kept.longest(list(range(6))).states is states[4], "one token must be left to read"
    assert kept.longest([0, 1, 2, 3, 9, 9, 9]).states is states[4]
    assert kept.longest([0, 1, 9]).states is states[2]
    assert kept.longest([9, 9, 9]) is None and kept.longest([]) is None
    kept.put([7, 7], states[7])  # 6 was not asked for since 4 and 2 were
    assert len(kept) == 3 and kept.longest(list(range(9))).states is states[4]
    kept.put([], states[0])
    assert len(kept) == 3
    none = Prefixes(0)
    none.put([1], states[1])
    assert len(none) == 0 and none.longest([1, 2]) is None


def test_a_snapshot_moves_to_where_the_model_is():
    """States may lie elsewhere (a file loads to the CPU) or in another precision of the convolution: they are copied in."""
    decoder = text_engine()
    snapshot = decoder.remember("some text before")
    assert all(x.device == decoder.model.device for x in bits(snapshot))
    twin = Snapshot(
        tuple(map_state(torch.clone, state) for state in snapshot.states),
        *(getattr(snapshot, name) for name in ("read", "pending", "seen", "fingerprint", "model")),
    )
    assert decoder.submit(" and", greedy(5), after=twin).result().text == decoder.submit(" and", greedy(5), after=snapshot).result().text
