"""The ONE layer: any write rule with any read rule, in the shell that Mamba-2, GLA, Gated DeltaNet and KLA share.

q, k, v = SiLU(conv(W_qkv x));   S written by the write rule;   q cleaned by the read rule
y = W_out (RMSNorm_head(K^-½ · Sᵀq) · SiLU(W_gate x))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastweights import ops
from fastweights.layers.conv import ShortConv
from fastweights.layers.linear import project
from fastweights.layers.norm import RMSNorm
from fastweights.layers.place import check_hidden, positions
from fastweights.notation import Coefficients, CuSeqlens, Hidden, Key, MemoryState, Query, Value
from fastweights.options import check_known, option_defaults
from fastweights.read import READ_RULES
from fastweights.write import WRITE_RULES


def parse_mixer(mixer: str) -> tuple[str, str]:
    """``"kla+ccq"`` -> ``("kla", "ccq")``, ``"gla"`` -> ``("gla", "raw")``. ValueError for a rule that does not exist."""
    write, plus, read = mixer.partition("+")
    read = read if plus else "raw"
    if mixer == "softmax":
        raise ValueError(
            "mixer 'softmax' is no memory: its layer is fastweights.layers.SoftmaxAttention; FastWeightsConfig(mixer='softmax') builds that"
        )
    if write not in WRITE_RULES or read not in READ_RULES:
        raise ValueError(
            f"mixer {mixer!r} is not write[+read] with write one of {', '.join(WRITE_RULES)} and read one of {', '.join(READ_RULES)}"
        )
    return write, read


def mixer_options(mixer: str) -> dict[str, object]:
    """Every option of a mixer by its flat name, with its default: the write rule's as they are, the read rule's as ``<read>_<option>``."""
    write, read = parse_mixer(mixer)
    options = option_defaults(WRITE_RULES[write].Options)
    return options | {f"{read}_{name}": default for name, default in option_defaults(READ_RULES[read].Options).items()}


class Operands(NamedTuple):
    """What a layer gives its memories."""

    q: Query
    k: Key
    v: Value
    coef: Coefficients
    conv: Tensor | None
    """The convolution's state after these tokens."""
    place: Tensor
    """How many tokens of its document each row has read then."""
    read: tuple[Tensor | None, ...]
    """What the read makes of each token by itself."""


class FastWeightAttention(nn.Module):
    """Linear attention with a chosen write and read. ``mixer`` is ``"write"`` or ``"write+read"``, `parse_mixer` says which exist.

    ``num_value_heads`` (a multiple of ``num_heads``, by default equal) may share keys; ``head_k_dim`` defaults to
    ``hidden_size // num_heads`` and ``head_v_dim`` to ``hidden_size // num_value_heads``; ``conv_size`` 0 leaves the convolution out.
    ``rule_options`` are those of `mixer_options`; ``backend`` is handed to `fastweights.ops`. Raises ValueError for what cannot be built.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_value_heads: int | None = None,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        mixer: str = "kla+ccq",
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        **rule_options,
    ) -> None:
        super().__init__()
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        _check_heads(hidden_size, num_heads, num_value_heads, head_k_dim, head_v_dim, conv_size)
        self.hidden_size, self.mixer, self.backend = hidden_size, mixer, backend
        self.num_heads, self.num_value_heads = num_heads, num_value_heads
        self.head_k_dim = hidden_size // num_heads if head_k_dim is None else head_k_dim
        self.head_v_dim = hidden_size // num_value_heads if head_v_dim is None else head_v_dim
        self.key_size, self.value_size = num_heads * self.head_k_dim, num_value_heads * self.head_v_dim

        write, read = parse_mixer(mixer)
        check_known(f"mixer {mixer!r}", rule_options, mixer_options(mixer))
        read_options = {name.removeprefix(f"{read}_"): rule_options.pop(name) for name in list(rule_options) if name.startswith(f"{read}_")}

        self.qkv_proj = nn.Linear(hidden_size, 2 * self.key_size + self.value_size, bias=False)
        self.conv = ShortConv(2 * self.key_size + self.value_size, conv_size)
        self.write = WRITE_RULES[write](
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_value_heads=num_value_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            **rule_options,
        )
        self.read = READ_RULES[read](self.write, **read_options)
        self.recurrence = {"delta": ops.delta, "decay": ops.decay}[self.write.family]
        self.gate_proj = nn.Linear(hidden_size, self.value_size, bias=False)
        self.norm = RMSNorm(self.head_v_dim, norm_eps)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    def initial_state(self, rows: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MemoryState:
        """The state before the first token of ``rows`` sequences; device and dtype (of the convolution's part) default to the weights'."""
        device = self.qkv_proj.weight.device if device is None else device
        dtype = self.qkv_proj.weight.dtype if dtype is None else dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return MemoryState(
            memory=torch.zeros(rows, self.num_value_heads, self.head_k_dim, self.head_v_dim, device=device, dtype=wide),
            conv=self.conv.initial_state(rows, device, dtype),
            place=torch.zeros(rows, device=device, dtype=torch.int64),
            read=self.read.initial_state(rows, device, wide),
        )

    def forward(self, x: Hidden, *, state: MemoryState | None = None, cu_seqlens: CuSeqlens | None = None) -> tuple[Hidden, MemoryState]:
        """``x [B, T, D] -> y [B, T, D]`` and the state after it, which shares no storage with the given one.

        With ``cu_seqlens [documents + 1]``, B is 1 and the documents in x are apart; ``state`` then has one row a document.
        Raises ValueError for operands that do not fit.
        """
        operands = self.operands(x, state, cu_seqlens)
        o, state = self.remember(operands, state, cu_seqlens)
        return self.output(x, o), state

    def operands(self, x: Hidden, state: MemoryState | None, cu_seqlens: CuSeqlens | None = None) -> Operands:
        """The first of `forward`'s three parts: all that the memories are given."""
        check_hidden(x, self.hidden_size)
        _, conv, place, _ = (None, None, None, None) if state is None else state
        position, place = positions(x, place, cu_seqlens)
        qkv, conv = self.conv(self.qkv_proj(x), state=conv, cu_seqlens=cu_seqlens)
        q, k, v, coef = self._by_heads(x, qkv, position)
        return Operands(q, k, v, coef, conv, place, self.read.operands(q, coef))

    def remember(self, given: Operands, state: MemoryState | None, cu_seqlens: CuSeqlens | None = None) -> tuple[Value, MemoryState]:
        """The second: what is read from the memories ``o [B, T, Hv, V]``, and the state after it."""
        q, k, v, coef, conv, place, by_token = given
        memory, read = (None, None) if state is None else (state.memory, state.read)
        q, read = self.read(q, k, coef, operands=by_token, state=read, cu_seqlens=cu_seqlens, backend=self.backend)
        o, memory = self.recurrence(q, k, v, coef, scale=self.head_k_dim**-0.5, state=memory, cu_seqlens=cu_seqlens, backend=self.backend)
        return o, MemoryState(memory, conv, place, read)

    def output(self, x: Hidden, o: Value) -> Hidden:
        """The third."""
        return self._gated_output(self.gate_proj(x), o)

    def _gated_output(self, gate: Tensor, o: Value) -> Hidden:
        gate = gate.unflatten(-1, (self.num_value_heads, self.head_v_dim))
        return project(self.norm(o, gate), self.out_proj)[0]

    @torch.no_grad()
    def step_(self, x: Hidden, state: MemoryState, *, move_on: bool = True) -> Hidden:
        """A few tokens of `forward`, for inference: overwrites the tensors of ``state`` and returns y ``[B, T, D]``; no gradients.

        Without ``move_on`` it leaves ``state.place`` to the caller, who can move those of all layers on at once.
        Nothing in it waits for a device, and all shapes follow from x's, so that a CUDA graph may hold it.
        """
        check_hidden(x, self.hidden_size)
        position, place = positions(x, state.place, None)
        qkv, gate = project(x, self.qkv_proj, self.gate_proj)
        qkv = self.conv.step_(qkv, state.conv)
        q, k, v, coef = self._by_heads(x, qkv, position)
        o = self.read.write_and_read_(
            q, k, v, coef, state.memory, state.read, family=self.write.family, scale=self.head_k_dim**-0.5, backend=self.backend
        )
        if move_on:
            state.place.copy_(place)
        return self._gated_output(gate, o)

    def _by_heads(self, x: Hidden, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Coefficients]:
        """q, k, v by heads, and the coefficients of the write."""
        q, k, v = ops.split_columns(qkv, (self.key_size, self.key_size, self.value_size))
        q, k = (t.unflatten(-1, (self.num_heads, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (self.num_value_heads, self.head_v_dim))
        beta, log_decay, key_scale, value_scale, _ = self.write(x, k, v, position)
        # Not _replace: torch 2.11's compiler cannot hand out of a graph what that has made.
        return q, k, v, Coefficients(beta, log_decay, key_scale, value_scale, self.write.query_scale(q))

    def extra_repr(self) -> str:
        return f"{self.mixer}, Hk={self.num_heads}, Hv={self.num_value_heads}, K={self.head_k_dim}, V={self.head_v_dim}"


def _check_heads(hidden_size, num_heads, num_value_heads, head_k_dim, head_v_dim, conv_size) -> None:
    if num_heads < 1 or num_value_heads < 1 or num_value_heads % num_heads:
        raise ValueError(f"num_value_heads={num_value_heads} is not a positive multiple of num_heads={num_heads}")
    if head_k_dim is None and hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}; give head_k_dim")
    if head_v_dim is None and hidden_size % num_value_heads:
        raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_value_heads={num_value_heads}; give head_v_dim")
    for name, size in (("hidden_size", hidden_size), ("head_k_dim", head_k_dim), ("head_v_dim", head_v_dim)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} is not positive")
    if conv_size < 0:
        raise ValueError(f"conv_size={conv_size} is negative; 0 leaves the convolution out")
