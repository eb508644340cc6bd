"""In-place steps: what the decoding engine calls. Token by token they are the forward pass, and they write only into the state given."""

import pytest
import torch

from tests.layers.mixers import MIXERS, D, build, build_softmax, close, tensors_of
from tests.models.tiny import EVERY_KIND, kinds, tiny_model, tokens

OPTIONS = {"kla+ccq": [{}, {"ccq_forget": "memory", "ccq_unit_keys": True}, {"num_value_heads": 4, "conv_size": 0}]}


@pytest.mark.parametrize("mixer, options", [(mixer, options) for mixer in MIXERS for options in OPTIONS.get(mixer, [{}])])
@pytest.mark.parametrize("piece", [1, pytest.param(3, marks=pytest.mark.full)])
def test_steps_of_a_layer_equal_its_forward(mixer, options, piece):
    layer = build(mixer, **options).double()
    x = torch.randn(2, 9, D, dtype=torch.float64)
    y, last = layer(x)
    state = layer.initial_state(2)
    before = [t.data_ptr() for t in tensors_of(state)]
    close(torch.cat([layer.step_(part, state) for part in x.split(piece, dim=1)], dim=1), y)
    assert [t.data_ptr() for t in tensors_of(state)] == before
    for kept, expected in zip(tensors_of(state), tensors_of(last), strict=True):
        close(kept, expected)


@pytest.mark.parametrize(
    "mixer, options",
    [
        ("kla+ccq", OPTIONS["kla+ccq"][1]),
        pytest.param("kla+ccq", OPTIONS["kla+ccq"][2], marks=pytest.mark.full),
        pytest.param("gated_deltanet+ccq", {}, marks=pytest.mark.full),
        pytest.param("gated_deltanet+ccq", {"num_value_heads": 4, "ccq_unit_keys": True}, marks=pytest.mark.full),
    ],
)
def test_one_launch_in_a_layer_is_its_two_steps(mixer, options, monkeypatch):
    """Asked for by backend="triton", here in Triton's interpreter."""
    kernel = pytest.importorskip("fastweights.ops.delta.ccq_step_triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs this kernel compiled")
    launches, call = [], kernel.delta_ccq_step_triton_
    monkeypatch.setattr(kernel, "delta_ccq_step_triton_", lambda *a, **o: launches.append(o) or call(*a, **o))
    x = torch.randn(2, 3, D)
    results = []
    for backend in ("torch", "triton"):
        layer = build(mixer, backend=backend, **options)
        state = layer.initial_state(2)
        results.append([torch.cat([layer.step_(part, state) for part in x.split(2, dim=1)], dim=1), *tensors_of(state)])
    assert len(launches) == 2
    for plain, fused in zip(*results, strict=True):
        close(fused, plain, digits=1e-5)


@pytest.mark.parametrize("window, slots", [(None, 9), (None, 14), (4, 4), (4, 7)])
def test_steps_of_softmax_equal_its_forward(window, slots):
    layer = build_softmax(window_size=window).double()
    x = torch.randn(2, 9, D, dtype=torch.float64)
    state = layer.initial_state(2, slots=slots)
    close(torch.cat([layer.step_(part, state) for part in x.split(1, dim=1)], dim=1), layer(x)[0])
    assert state.keys.shape[1] == slots and state.place.tolist() == [9, 9]


@pytest.mark.parametrize("kind", kinds(quick=("hybrid",)))
def test_steps_of_the_model_equal_its_forward(kind):
    model = tiny_model(dtype=torch.float64, **EVERY_KIND[kind])
    ids = tokens(3, 7)
    states = [
        block.mixer.initial_state(3, **({"slots": block.mixer.window_size or 7} if mixer == "softmax" else {}))
        for block, mixer in zip(model.model.layers, model.config.mixers, strict=True)
    ]
    logits = torch.stack([model.step_(ids[:, t : t + 1], states) for t in range(7)], dim=1)
    close(logits, model(ids).logits, digits=1e-9)
    assert not logits.requires_grad


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_step_is_one_graph(backend):
    """With Triton's kernels too (here in its interpreter), which dispatch imports while the compiler traces."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there the interpreter is off")
    layer = build("kla+ccq", backend=backend)
    x, state, same = torch.randn(2, 1, D), layer.initial_state(2), layer.initial_state(2)
    y = torch.compile(layer.step_, fullgraph=True, backend="aot_eager")(x, state)
    close(y, layer.step_(x, same), digits=1e-6)
    for got, expected in zip(tensors_of(state), tensors_of(same), strict=True):
        close(got, expected, digits=1e-6)
