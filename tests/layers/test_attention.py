"""The ONE layer: every write with every read, through pieces, packs, halves and the odd inputs."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.layers import FastWeightAttention, mixer_options, parse_mixer
from fastweights.layers.place import check_hidden, positions
from fastweights.precision import Float32Module, float32_parameters
from tests.layers.mixers import MIXERS, D, H, K, V, build, close, join, tensors_of

T = 24


def hidden(rows=1, tokens=T, dtype=torch.float64, seed=5):
    return torch.randn(rows, tokens, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def lengths_to_bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def run_in_pieces(layer, x, pieces, state=None):
    outputs = []
    for piece in x.split(pieces, dim=1):
        y, state = layer(piece, state=state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def partitions(tokens, sizes):
    """Lists of piece sizes, drawn from ``sizes``, that add up to ``tokens``."""

    def fit(drawn):
        ends = itertools.accumulate(drawn)
        kept = [size for size, end in zip(drawn, ends, strict=True) if end <= tokens]
        return [*kept, tokens - sum(kept)]

    return st.lists(st.sampled_from(sizes), min_size=1, max_size=10).map(fit)


def check_partition(mixer, heads, tokens, partition):
    layer = build(mixer, num_value_heads=heads, **({"sequence_factor": "1/sqrt(t)"} if mixer.startswith("kla") else {})).double()
    x = hidden(rows=2, tokens=tokens)
    expected, expected_state = layer(x)
    y, state = run_in_pieces(layer, x, partition)
    close(y, expected)
    for actual, whole in zip(tensors_of(state), tensors_of(expected_state), strict=True):
        close(actual.double(), whole.double())
    assert state.place.tolist() == [tokens, tokens] and state.place.dtype == torch.int64


@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("mixer", MIXERS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(partition=partitions(T, [1, 2, 3, 5, 8, 0]))
def test_any_partition_through_the_state_is_one_pass(mixer, heads, partition):
    check_partition(mixer, heads, T, partition)


@pytest.mark.full
@pytest.mark.parametrize("heads", [H, 2 * H])
@pytest.mark.parametrize("mixer", MIXERS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(partition=partitions(200, [1, 2, 3, 15, 16, 17, 63, 64, 65, 0]))
def test_any_partition_across_chunks_is_one_pass(mixer, heads, partition):
    check_partition(mixer, heads, 200, partition)


@pytest.mark.parametrize(
    "options", [{"ccq_forget": "memory"}, {"ccq_strength": "learned"}, {"conv_size": 2}, {"conv_size": 0}, {"conv_size": 1}]
)
def test_pieces_of_one_with_options(options):
    layer = build("kla+ccq", **options).double()
    x = hidden(rows=2)
    expected, _ = layer(x)
    y, _ = run_in_pieces(layer, x, 1)
    close(y, expected)


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_are_the_documents_apart(mixer):
    """Outputs, states and gradients, from given states, with empty documents among them."""
    layer = build(mixer, **({"sequence_factor": "1/t"} if mixer.startswith("kla") else {})).double()
    lengths = [5, 0, 1, 9, 2, 0]
    x = hidden(tokens=sum(lengths)).requires_grad_()
    with torch.no_grad():
        starts = [layer(hidden(tokens=i + 1, seed=i))[1] for i in range(len(lengths))]
    for start in starts:
        start.memory.requires_grad_()

    def grads(y, memory):
        leaves = [x, *layer.parameters(), *(s.memory for s in starts)]
        return torch.autograd.grad(y.square().sum() + memory.square().sum(), leaves, allow_unused=True)

    y, state = layer(x, state=join(starts), cu_seqlens=lengths_to_bounds(lengths))
    apart = [layer(piece, state=start) for piece, start in zip(x.split(lengths, dim=1), starts, strict=True)]
    y_apart, state_apart = torch.cat([a for a, _ in apart], dim=1), join([s for _, s in apart])
    close(y, y_apart)
    for actual, expected in zip(tensors_of(state), tensors_of(state_apart), strict=True):
        close(actual.double(), expected.double())
    for actual, expected in zip(grads(y, state.memory), grads(y_apart, state_apart.memory), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            close(actual, expected, 1e-9)


@pytest.mark.parametrize("mixer", MIXERS)
def test_changing_one_document_changes_no_bit_of_another(mixer):
    layer = build(mixer)
    bounds = torch.tensor([0, 11, 24])
    x = hidden(dtype=torch.float32)
    other = torch.cat([hidden(tokens=11, seed=9, dtype=torch.float32), x[:, 11:]], dim=1)
    (y, state), (y_other, state_other) = layer(x, cu_seqlens=bounds), layer(other, cu_seqlens=bounds)
    assert not torch.equal(y[:, :11], y_other[:, :11]) and torch.equal(y[:, 11:], y_other[:, 11:])
    for a, b in zip(tensors_of(state), tensors_of(state_other), strict=True):
        assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("tokens", [0, 1, T])
def test_no_given_state_is_changed_or_shared(mixer, tokens):
    layer = build(mixer).eval()
    _, state = layer(hidden(rows=2, tokens=7, dtype=torch.float32))
    before = [t.clone() for t in tensors_of(state)]
    _, new = layer(hidden(rows=2, tokens=tokens, dtype=torch.float32), state=state)
    storages = {t.untyped_storage().data_ptr() for t in tensors_of(state)}
    assert len(tensors_of(new)) == len(before)
    for t in tensors_of(new):
        assert t.untyped_storage().data_ptr() not in storages
    with torch.no_grad():
        for t in tensors_of(new):
            t.zero_()
    for t, saved in zip(tensors_of(state), before, strict=True):
        assert torch.equal(t, saved)


@pytest.mark.parametrize("mixer", MIXERS)
def test_initial_state_is_the_state_of_no_tokens(mixer):
    layer = build(mixer)
    x = hidden(rows=2, dtype=torch.float32)
    state = layer.initial_state(2)
    y, _ = layer(x, state=state)
    expected, _ = layer(x)
    assert torch.equal(y, expected)
    _, after_nothing = layer(x[:, :0])
    for a, b in zip(tensors_of(state), tensors_of(after_nothing), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_acts(mixer):
    options = {"key_norm": "learned"} if mixer.startswith("kla") else {}
    options |= {"ccq_strength": "learned"} if mixer.endswith("ccq") else {}
    layer = build(mixer, **options)
    y, _ = layer(hidden(rows=2, dtype=torch.float32))
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_every_dtype_is_finite_forward_and_backward(mixer, dtype):
    """Half precision lies close to float32 with ordinary inputs, and is finite with larger ones.

    Twice as large only where the output grows with q, k and v alike (``decay`` family) in float16: further on it is past 65,504.
    """
    layer, x = build(mixer), hidden(rows=2, dtype=torch.float32)
    factor = 2 if layer.write.family == "decay" and dtype == torch.float16 else 100
    expected, _ = layer(x)
    if dtype == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = layer(x, state=layer.initial_state(2))
            large, _ = layer(factor * x)
            again, _ = layer(x[:, :3], state=state)
        kind = torch.bfloat16
    else:
        layer, x, kind = layer.to(dtype), x.to(dtype), dtype
        y, state = layer(x)
        large, _ = layer(factor * x)
        again, _ = layer(x[:, :3], state=state)
    assert y.dtype == kind and again.dtype == kind
    assert {t.dtype for t in (state.memory, *tensors_of(state.read))} == {torch.float32}
    assert all(p.dtype == torch.float32 for _, p in float32_parameters(layer))
    assert all(torch.isfinite(t).all() for t in (y, large, again, *tensors_of(state)))
    assert (y.float() - expected).norm() <= 16 * torch.finfo(kind).eps * expected.norm()
    (y.float().square().mean() + again.float().square().mean()).backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("mixer", MIXERS)
def test_all_zero_keys_leave_the_memory_but_for_the_decay(mixer):
    layer = build(mixer)
    _, state = layer(hidden(dtype=torch.float32, tokens=9))
    state = state._replace(conv=torch.zeros_like(state.conv))
    with torch.no_grad():
        layer.qkv_proj.weight[layer.key_size : 2 * layer.key_size] = 0
    x = hidden(dtype=torch.float32, tokens=1).requires_grad_()
    y, new = layer(x, state=state)
    k = torch.zeros(1, 1, H, K)
    coef = layer.write(x, k, torch.randn(1, 1, H, V), torch.zeros(1, 1, dtype=torch.int64))
    decay = 1 if coef.log_decay is None else coef.log_decay.exp()[:, 0].reshape(1, H, -1, 1)
    close(new.memory, decay * state.memory, 1e-6)
    y.square().sum().backward()
    assert torch.isfinite(y).all() and all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("mixer", MIXERS)
def test_built_on_meta_then_reset(mixer):
    """Every parameter is filled by the reset_parameters of the module that owns it, and A_log, dt_bias are where they should be."""
    options = {"key_norm": "learned"} if mixer.startswith("kla") else {}
    options |= {"ccq_strength": "learned"} if mixer.endswith("ccq") else {}
    arguments = {"hidden_size": D, "num_heads": H, "head_v_dim": V, "mixer": mixer, **options}
    with torch.device("meta"):
        layer = FastWeightAttention(**arguments)
    layer = layer.bfloat16().to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    born = FastWeightAttention(**arguments).bfloat16()
    for (name, parameter), other in zip(layer.named_parameters(), born.parameters(), strict=True):
        assert torch.isfinite(parameter).all() and parameter.dtype == other.dtype, name
        if name.endswith("A_log"):
            assert parameter.dtype == torch.float32 and (parameter.exp() <= 16).all()
        if name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(parameter)
            assert parameter.dtype == torch.float32 and (dt >= 0.99e-3).all() and (dt <= 0.101).all()
    y, _ = layer(hidden(dtype=torch.bfloat16))
    assert torch.isfinite(y).all()


def test_built_under_bfloat16_decays_are_finite_and_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = FastWeightAttention(hidden_size=512, num_heads=512)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.qkv_proj.weight.dtype == torch.bfloat16
    decay = layer.write.decay
    assert decay.A_log.dtype == torch.float32 and torch.isfinite(decay.A_log).all()
    assert len(decay.A_log.unique()) > 400  # bfloat16 would leave some 250 values
    assert 7 < decay.A_log.exp().mean() < 9
    assert decay.dt_bias.dtype == torch.float32 and torch.isfinite(decay.dt_bias).all()


def test_all_parameters_of_rules_and_norms_are_float32_and_no_others():
    layer = FastWeightAttention(hidden_size=16, num_heads=2)
    names = {name for name, _ in float32_parameters(layer)}
    assert names == {n for n, _ in layer.named_parameters() if n.split(".")[0] in ("write", "read", "norm")}
    assert isinstance(layer.norm, Float32Module)


class TestRefusals:
    @pytest.mark.parametrize("mixer", ["", "kda", "kla+ccqs", "kla+", "+ccq", "kla+ccq+ccq", "softmax+ccq"])
    def test_unknown_mixers(self, mixer):
        with pytest.raises(ValueError, match=r"is not write\[\+read\] with write one of linear, .*, kla and read one of raw, ccq"):
            parse_mixer(mixer)

    def test_softmax_is_no_memory_and_its_place_is_told(self):
        with pytest.raises(ValueError, match=r"fastweights\.layers\.SoftmaxAttention; FastWeightsConfig\(mixer='softmax'\)"):
            FastWeightAttention(hidden_size=16, num_heads=2, mixer="softmax")

    def test_parse_mixer(self):
        assert [parse_mixer(m) for m in ("kla+ccq", "gla", "gla+raw")] == [("kla", "ccq"), ("gla", "raw"), ("gla", "raw")]

    @pytest.mark.parametrize("mixer, option", [("kla", "ccq_forget"), ("gla+ccq", "eta_max"), ("linear", "eps"), ("kla+ccq", "forget")])
    def test_options_no_rule_has(self, mixer, option):
        with pytest.raises(ValueError, match=f"has no option '{option}'; it has: {', '.join(mixer_options(mixer)) or 'none'}"):
            build(mixer, **{option: 1})

    @pytest.mark.parametrize("write", ["linear", "deltanet", "gla"])
    def test_forgetting_with_a_memory_that_has_no_decay_per_head(self, write):
        with pytest.raises(ValueError, match=f"ccq_forget='memory' needs a decay per head, and write rule '{write}' has none"):
            build(f"{write}+ccq", ccq_forget="memory")

    def test_forgetting_with_grouped_heads(self):
        with pytest.raises(ValueError, match="needs one decay a key head, and there are 4 value heads on 2 key heads"):
            build("kla+ccq", ccq_forget="memory", num_value_heads=4)

    def test_keys_written_at_several_lengths(self):
        with pytest.raises(ValueError, match=r"write rule 'longhorn' with 4 value heads on 2 key heads .* use ccq_unit_keys=True"):
            build("longhorn+ccq", num_value_heads=4, ccq_unit_keys=False)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"num_heads": 3}, "hidden_size=16 is not a multiple of num_heads=3"),
            ({"num_heads": 2, "num_value_heads": 3}, "num_value_heads=3 is not a positive multiple of num_heads=2"),
            ({"num_heads": 1, "num_value_heads": 3}, "hidden_size=16 is not a multiple of num_value_heads=3"),
            ({"num_heads": 0}, "not a positive multiple of num_heads=0"),
            ({"num_heads": 2, "head_k_dim": 0}, "head_k_dim=0 is not positive"),
            ({"num_heads": 2, "conv_size": -1}, "conv_size=-1 is negative"),
        ],
    )
    def test_impossible_sizes(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            FastWeightAttention(hidden_size=16, **arguments)

    def test_operands(self):
        layer = build("kla+ccq")
        x = hidden(rows=2, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"x must be \[B, T, D\] with D = 16; got \[2, 24, 15\]"):
            layer(x[..., :15])
        with pytest.raises(ValueError, match=r"x must be \[B, T, D\] with D = 16; got \[24, 16\]"):
            check_hidden(x[0], 16)
        with pytest.raises(ValueError, match="batch must be 1; got B = 2"):
            layer(x, cu_seqlens=torch.tensor([0, T]))
        with pytest.raises(ValueError, match=r"must start at 0; got cu_seqlens\[0\] = 1"):
            layer(x[:1], cu_seqlens=torch.tensor([1, T]))
        with pytest.raises(ValueError, match=r"must end at T = 24; got cu_seqlens\[-1\] = 25"):
            layer(x[:1], cu_seqlens=torch.tensor([0, T + 1]))
        with pytest.raises(ValueError, match="the state has 3 rows and x has 2 sequences"):
            layer(x, state=layer.initial_state(3))
        with pytest.raises(ValueError, match="the state has 1 rows and x has 2 documents"):
            layer(x[:1], state=layer.initial_state(1), cu_seqlens=torch.tensor([0, 3, T]))
        with pytest.raises(ValueError, match="the raw read keeps no state"):
            build("kla")(x, state=layer.initial_state(2))


def test_positions_restart_in_every_document_and_go_on_from_the_state():
    x = torch.zeros(1, 7, D)
    for dtype in (torch.int32, torch.int64):
        position, place = positions(x, torch.tensor([0, 10, 20, 30]), torch.tensor([0, 0, 3, 4, 7], dtype=dtype))
        assert position.tolist() == [[10, 11, 12, 20, 30, 31, 32]] and place.tolist() == [0, 13, 21, 33]
        assert position.dtype == place.dtype == torch.int64
    position, place = positions(torch.zeros(2, 3, D), torch.tensor([5, 0]), None)
    assert position.tolist() == [[5, 6, 7], [0, 1, 2]] and place.tolist() == [8, 3]


@pytest.mark.parametrize("option, other", [("norm_eps", 0.5), ("conv_size", 2), ("num_value_heads", 4), ("backend", "reference")])
def test_every_argument_of_the_layer_acts(option, other):
    x = hidden(dtype=torch.float32)
    (y, _), (z, _) = build("kla+ccq")(x), build("kla+ccq", **{option: other})(x)
    if option == "backend":
        assert torch.allclose(y, z, rtol=1e-4, atol=1e-6)
        with pytest.raises(ValueError, match="backend"):
            build("kla+ccq", backend="cuda")(x)
    else:
        assert not torch.allclose(y, z, rtol=1e-3)


@pytest.mark.compile
@pytest.mark.parametrize("mixer", ["kla+ccq", pytest.param("gla+ccq", marks=pytest.mark.full)])
def test_the_layer_is_one_graph(mixer):
    layer = build(mixer, **({"sequence_factor": "1/t"} if mixer == "kla+ccq" else {}))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, bounds = hidden(dtype=torch.float32), torch.tensor([0, 11, 24])
    for arguments in ({}, {"cu_seqlens": bounds}):
        (y, state), (expected, _) = compiled(x, **arguments), layer(x, **arguments)
        close(y, expected, 1e-5)
        y.square().sum().backward()
    assert state.place.tolist() == [11, 13]
