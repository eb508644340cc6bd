"""Every quantity against a plain loop over tokens in float64, from the layer's inputs alone."""

import math

import numpy as np
import pytest
import torch

from fastweights.evaluate.microscope import STATES, TOKENS, inspect_memory
from fastweights.evaluate.needle import Needle, find_needle, over_prompts
from fastweights.layers import FastWeightAttention
from fastweights.read import READ_RULES
from tests.models.tiny import EVERY_KIND, kinds, tiny_model, tokens

T, CHUNK, TOP = 23, 7, 2
NEEDLE = Needle(begin=5, end=8, question=18, asked=20, asked_end=22)
WITH_MEMORY = [name for name in EVERY_KIND if name not in ("softmax", "sliding")]
ULPS = 1e-9
"""Relative, of float64 numbers that pass through a chunkwise form, a model of two layers and singular values."""


def plain_loop(model, ids, layer):
    """What the microscope should see in a layer: {name: [T, heads]}, the S and Σ after every token, and operands for the needle."""
    mixer = model.model.layers[layer].mixer
    hidden = model(ids[None], output_hidden_states=True).hidden_states[layer]
    x = model.model.layers[layer].mixer_norm(hidden)
    qkv, _ = mixer.conv(mixer.qkv_proj(x))
    q, k, v = qkv[0].split([mixer.key_size, mixer.key_size, mixer.value_size], dim=-1)
    H, Hv, K, V = mixer.num_heads, mixer.num_value_heads, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = q.view(T, H, K), k.view(T, H, K), v.view(T, Hv, V)
    coef = mixer.write(x, k[None], v[None], torch.arange(T)[None])
    per_key_head = ("key_norm", "lambda", "lambda_trace", "removed", "removed_top", "query_top")
    seen = {name: torch.full((T, H if name in per_key_head else Hv), math.nan) for name in TOKENS}
    seen = {name: x.double() for name, x in seen.items()}
    S, memories, sigmas, cleaned = torch.zeros(Hv, K, V).double(), [], [], []
    for t in range(T):
        for h in range(Hv):
            g = h * H // Hv  # the key head
            scale = 1.0 if coef.key_scale is None else coef.key_scale[0, t, h if coef.key_scale.shape[2] == Hv else g].item()
            value_scale = 1.0 if coef.value_scale is None else coef.value_scale[0, t, h if coef.value_scale.shape[2] == Hv else g].item()
            key, value = scale * k[t, g], value_scale * v[t, h]
            if coef.log_decay is not None and coef.log_decay.dim() == 4:
                a = coef.log_decay[0, t, g].exp()
                seen["decay"][t, h], seen["decay_min"][t, h], seen["decay_max"][t, h] = a.mean(), a.min(), a.max()
                seen["forgotten"][t, h] = -a.log().mean()
                S[h] = a[:, None] * S[h]
            elif coef.log_decay is not None:
                seen["decay"][t, h] = math.exp(coef.log_decay[0, t, h])
                seen["forgotten"][t, h] = -math.log(seen["decay"][t, h])
                S[h] = seen["decay"][t, h] * S[h]
            error = value - S[h].T @ key
            seen["key_norm"][t, g], seen["written_key_norm"][t, h] = k[t, g].norm(), key.norm()
            seen["value_norm"][t, h], seen["residual"][t, h] = value.norm(), error.norm()
            seen["residual_share"][t, h] = seen["residual"][t, h] / seen["value_norm"][t, h]
            if mixer.write.family == "delta":
                beta = 1.0 if coef.beta is None else coef.beta[0, t, h].item()
                seen["beta"][t, h], seen["corrected"][t, h] = beta, beta * (key @ key).item()
                S[h] = S[h] + beta * torch.outer(key, error)
                after = value - S[h].T @ key
                assert torch.allclose(after, (1 - seen["corrected"][t, h]) * error, atol=1e-12)  # what `corrected` claims
            else:
                S[h] = S[h] + torch.outer(key, value)
        memories.append(S.clone())
    if isinstance(mixer.read, READ_RULES["ccq"]):
        read, options = mixer.read, mixer.read.options
        q_scale = torch.ones(T, H).double() if coef.query_scale is None else coef.query_scale[0]
        q_scale = q_scale if mixer.write.q_norm == "none" else (q.square().sum(-1) + 1e-6).rsqrt()
        cleaned = q.clone()
        for t in range(T):
            sigma = torch.zeros(H, K, K).double()
            for g in range(H):
                lam = torch.sigmoid(read.lambda_weight[g] @ (q_scale[t, g] * q[t, g]) + read.lambda_bias[g]).item()
                lam *= math.sqrt(K) * read.log_strength[g].exp().item() if options.strength == "learned" else 1.0
                keys = keys_seen(read, k[: t + 1, g], None if coef.key_scale is None else coef.key_scale[0, : t + 1, g])
                weight = torch.ones(t + 1).double()
                if options.forget == "memory":
                    for j in range(t):
                        weight[j] = coef.log_decay[0, j + 1 : t + 1, g].sum().exp()
                sigma[g] = torch.cov(keys.T, correction=0, aweights=weight)
                cleaned[t, g] = q[t, g] - lam * sigma[g] @ q[t, g]
                seen["lambda"][t, g], seen["lambda_trace"][t, g] = lam, lam * sigma[g].trace()
                seen["removed"][t, g] = (q[t, g] - cleaned[t, g]).norm() / q[t, g].norm()
            sigmas.append(sigma)
        for t in range(T):
            for g in range(H):
                axes = np.linalg.eigh(sigmas[min(CHUNK * (t // CHUNK + 1), T) - 1][g].numpy())[1][:, -TOP:]
                for name, x in (("removed_top", q[t, g] - cleaned[t, g]), ("query_top", q[t, g])):
                    length = x.norm().item()  # of what the first query loses, 0: Σ of a single key is
                    seen[name][t, g] = ((axes.T @ x.numpy() / length) ** 2).sum() if length else 0.0
    if "decay_min" in seen:  # per channel is per key head
        for name in ("decay_min", "decay_max"):
            seen[name] = seen[name][:, :: Hv // H]
        if coef.log_decay is not None and coef.log_decay.dim() == 4:
            seen["decay"], seen["forgotten"] = seen["decay"][:, :: Hv // H], seen["forgotten"][:, :: Hv // H]
    return {name: x for name, x in seen.items() if not x.isnan().all()}, memories, sigmas, (q, cleaned, k, coef)


def keys_seen(read, k, key_scale):
    if read.unit_keys:
        return k / (k.square().sum(-1, keepdim=True) + read.options.eps).sqrt()
    return k if key_scale is None else k * key_scale[:, None]


def close(found, expected):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=ULPS, atol=ULPS * np.abs(expected).max())


@pytest.mark.parametrize("kind", kinds(WITH_MEMORY, quick=("kla+ccq", "gla+ccq", "linear+raw", "grouped, no conv, no MLP")))
def test_every_quantity_is_that_of_a_plain_loop(kind):
    model, ids, stride = tiny_model(torch.float64, **EVERY_KIND[kind]), tokens(T), 3
    view = inspect_memory(model, ids, chunk=CHUNK, stride=stride, top=TOP, rank_tolerance=0.05)
    assert view.positions.tolist() == list(range(0, T, 3)) and view.looks.tolist() == [7, 14, 21, 23]
    for layer in view.layers:
        with torch.no_grad():
            expected, memories, sigmas, _ = plain_loop(model, ids, layer.layer)
        assert list(layer.tokens) == list(expected)  # what the rule does not have is absent
        for name, x in expected.items():
            close(layer.tokens[name], x[::stride])
        assert list(layer.states) == [name for name in STATES if not name.startswith("sigma") or sigmas]
        for look, t in enumerate(view.looks):
            for h, S in enumerate(memories[t - 1]):
                s = np.linalg.svd(S.numpy(), compute_uv=False)
                p = s / s.sum()
                close(layer.states["frobenius"][look, h], np.sqrt((s**2).sum()))
                close(layer.states["spectral"][look, h], s[0])
                close(layer.states["stable_rank"][look, h], (s**2).sum() / s[0] ** 2)
                close(layer.states["effective_rank"][look, h], np.exp(-sum(x * np.log(x) for x in p if x > 0)))
                assert layer.states["numerical_rank"][look, h] == sum(x > 0.05 * s[0] for x in s)
            for h, sigma in enumerate(sigmas[t - 1] if sigmas else ()):
                close(layer.states["sigma_trace"][look, h], sigma.trace())
                close(layer.states["sigma_top"][look, h], np.sort(np.linalg.eigvalsh(sigma.numpy()))[::-1][:2])


@pytest.mark.parametrize("kind", kinds(WITH_MEMORY, quick=("kla+ccq", "gla+raw")))
@pytest.mark.parametrize("chunk", [6, pytest.param(64, marks=pytest.mark.full)])
def test_needle_keys_against_haystack_keys(kind, chunk):
    model, ids = tiny_model(torch.float64, **EVERY_KIND[kind]), tokens(T)
    for layer in inspect_memory(model, ids, chunk=chunk, top=3, needle=NEEDLE).layers:
        mixer = model.model.layers[layer.layer].mixer
        with torch.no_grad():
            expected, _, sigmas, (q, cleaned, k, coef) = plain_loop(model, ids, layer.layer)
        places = {"needle": range(5, 8), "haystack": [*range(5), *range(8, 18)], "passage": range(11, 14)}
        assert layer.needle["tokens"] == {"needle": 3, "haystack": 15, "passage": 3}
        for g in range(mixer.num_heads):
            scale = None if coef.key_scale is None else coef.key_scale[0, :, g]
            if sigmas:
                keys, sigma = keys_seen(mixer.read, k[:, g], scale), sigmas[-1][g]
            else:
                bounded = mixer.write.keys_bounded and not mixer.write.key_scale_per_value_head
                unit = (k[:, g].square().sum(-1) + 1e-6).rsqrt()
                keys = k[:, g] * (scale if bounded else unit)[:, None]
                sigma = torch.cov(keys.T, correction=0)
            vectors = np.linalg.eigh(sigma.numpy())[1][:, ::-1]
            for kind_of, chosen in places.items():
                units = [(keys[j] / keys[j].norm()).numpy() for j in chosen]
                for r in (1, 2, 3):
                    share = np.mean([((vectors[:, :r].T @ u) ** 2).sum() for u in units])
                    np.testing.assert_allclose(layer.needle["projection"][kind_of][r - 1][g], share, rtol=1e-6)
                if not sigmas:
                    assert "survives_query" not in layer.needle and "survives_direction" not in layer.needle
                    continue
                before = sum((keys[j] @ q[t, g]) ** 2 for j in chosen for t in (20, 21))
                after = sum((keys[j] @ cleaned[t, g]) ** 2 for j in chosen for t in (20, 21))
                close(layer.needle["survives_query"][kind_of][g], (after / before).sqrt())
                lam = expected["lambda"][[20, 21], g].mean().item()
                close(layer.needle["survives_direction"][kind_of][g], 1 - lam * np.mean([u @ sigma.numpy() @ u for u in units]))


def test_an_ordinary_passage_lies_in_the_longer_part_of_the_haystack():
    assert Needle(10, 14, 20, 21, 22).passage == (3, 7) and Needle(2, 6, 20, 21, 22).passage == (11, 15)
    assert Needle(2, 12, 14, 14, 15).passage == (0, 2)  # and is as long as fits


def test_a_needle_looked_at_alone_is_the_same():
    model, ids = tiny_model(torch.float64, mixer="kla+ccq"), tokens(T)
    both, alone = (inspect_memory(model, ids, chunk=6, needle=NEEDLE, needle_only=only).layers for only in (False, True))
    assert [layer.needle for layer in both] == [layer.needle for layer in alone]
    assert not any(layer.tokens or layer.states for layer in alone)


def test_over_prompts_are_means_and_paired_differences():
    def found(needle, haystack, passage):
        kinds = {"needle": needle, "haystack": haystack, "passage": passage}
        return {"projection": {kind: [[0.0, 0.0], heads] for kind, heads in kinds.items()}, "tokens": dict.fromkeys(kinds, 4)}

    both = over_prompts([found([0.1, 0.3], [0.3, 0.5], [0.1, 0.2]), found([0.2, 0.4], [0.5, 0.5], [0.3, 0.4])])
    assert both["prompts"] == 2 and both["tokens"] == {"needle": 4, "haystack": 4, "passage": 4}
    close(both["projection"]["needle"], [[0, 0], [0.15, 0.35]])
    haystack, passage = (both["difference"]["projection"][other] for other in ("haystack", "passage"))
    close(haystack["mean"]["value"], -0.2)  # of −0.2 and −0.2
    close(haystack["mean"]["low"], -0.2)
    close([head["value"] for head in haystack["heads"]], [-0.25, -0.15])
    assert haystack["heads"][0]["low"] < -0.25 < haystack["heads"][0]["high"]
    assert haystack["below"] == 1 and passage["below"] == 0.5  # +0.05 and −0.05
    one = over_prompts([found([0.1, 0.3], [0.3, 0.5], [0.1, 0.2])])
    assert one["difference"]["projection"]["haystack"]["mean"]["low"] is None  # one prompt tells no spread


def test_a_float32_model_is_seen_as_it_computes():
    """Its numbers are near the float64 model's, and it is left as it was found: same logits, no hook behind."""
    model, exact, ids = tiny_model(mixer="kla+ccq"), tiny_model(torch.float64, mixer="kla+ccq"), tokens(T)
    before = model(ids[None]).logits
    seen, truth = (inspect_memory(m, ids, chunk=8).layers[1] for m in (model, exact))
    for name, x in truth.tokens.items():
        np.testing.assert_allclose(seen.tokens[name], x, rtol=1e-3, atol=1e-4 * np.abs(x).max())
    assert torch.equal(model(ids[None]).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_memory_does_not_grow_with_the_text():
    """No call sees more than a chunk, whatever the text's length; what is kept is the recorded rows."""
    model, sizes = tiny_model(mixer="kla+ccq"), []
    handle = model.model.layers[0].mixer.register_forward_hook(lambda mixer, args, output: sizes.append(args[0].shape[1]))
    view = inspect_memory(model, tokens(400), chunk=64, stride=40, layers=[0])
    handle.remove()
    assert all(x.base is None for x in view.layers[0].tokens.values())  # not a window on more
    assert set(sizes) == {64, 400 % 64} and view.layers[0].tokens["beta"].shape == (10, 2) and len(view.layers) == 1


def test_softmax_layers_are_passed_over_and_a_model_of_them_alone_is_refused():
    view = inspect_memory(tiny_model(**EVERY_KIND["hybrid"]), tokens(T))
    assert [layer.layer for layer in view.layers] == [0] and view.without_memory == [1]
    with pytest.raises(ValueError, match="there is no memory to look at: layer 0, 1 is softmax attention"):
        inspect_memory(tiny_model(mixer="softmax"), tokens(T))


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"layers": [2]}, "layer 2 does not exist; the model has layers 0 to 1"),
        ({"chunk": 0}, "chunk=0 is not positive"),
        ({"stride": -1}, "stride=-1 is not positive"),
        ({"needle": Needle(5, 5, 6, 7, 8)}, "must follow each other"),
        ({"needle": Needle(0, 18, 18, 20, 22)}, "the needle is all of the text before the question"),
        ({"ids": torch.zeros(0, dtype=torch.int64)}, "the text has no tokens"),
    ],
)
def test_what_cannot_be_seen_is_said(arguments, told):
    with pytest.raises(ValueError, match=told):
        inspect_memory(tiny_model(mixer="kla"), **{"ids": tokens(T)} | arguments)


@pytest.mark.parametrize("chunk", [4, 100])
def test_finding_a_needle_is_greedy_decoding(chunk):
    model, prompt = tiny_model(mixer="kla+ccq"), tokens(17).tolist()
    said = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, 17:].tolist()
    found = find_needle(model, prompt, said, chunk=chunk)
    logits = model(torch.tensor([prompt + said])).logits[0].log_softmax(-1)
    nats = -sum(logits[16 + i, token].item() for i, token in enumerate(said))
    assert found.retrieved and found.nats == pytest.approx(nats, rel=1e-5)
    wrong = find_needle(model, prompt, [*said[:-1], (said[-1] + 1) % 61], chunk=chunk)
    assert not wrong.retrieved and wrong.nats > found.nats
    assert find_needle(model, prompt[:1], said[:1]).nats > 0


def test_the_layers_hooked_are_those_of_the_model():
    """The microscope leans on these modules being called in the layer's forward; a change of the layer shows here first."""
    layer = FastWeightAttention(hidden_size=16, num_heads=2)
    called = []
    for name in ("write", "read"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.randn(1, 3, 16))
    assert called == ["write", "read"]
