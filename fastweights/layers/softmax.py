"""Softmax attention with rotary positions, full or over a sliding window: the baseline, and the other half of hybrids.

    o_t = Σ_j softmax_j(K^-½ q_tᵀk_j) v_j   over j ≤ t in the same document, and j > t − window_size if there is one

Sources: Vaswani et al. (arXiv 1706.03762); rotary positions: Su et al., RoFormer (arXiv 2104.09864), as pairs (i, i + K/2) of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers.place import check_hidden, positions
from fastweights.layers.softmax_documents import layout
from fastweights.notation import CuSeqlens, Hidden

EMPTY = -1


class SoftmaxState(NamedTuple):
    """The keys and values that later tokens may see. Rows are independent: reorder and copy them freely."""

    keys: Tensor
    """Keys, turned to their place ``[R, slots, H, K]``."""
    values: Tensor
    """``[R, slots, H, K]``."""
    key_place: Tensor
    """The place of each key in its document ``[R, slots]``, int64, rising along a row; −1 marks an empty slot."""
    place: Tensor
    """How many tokens of its document each row has read ``[R]``, int64."""


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention through torch's scaled_dot_product_attention, with the same face as `FastWeightAttention`."""

    def __init__(self, *, hidden_size: int, num_heads: int, window_size: int | None = None, rope_theta: float = 10_000.0) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % (2 * num_heads):
            raise ValueError(f"hidden_size={hidden_size} is not an even multiple of num_heads={num_heads}, and rotary positions need pairs")
        if window_size is not None and window_size < 1:
            raise ValueError(f"window_size={window_size} is not positive; None means full attention")
        if not rope_theta > 0:
            raise ValueError(f"rope_theta={rope_theta} is not positive")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.window_size, self.rope_theta = window_size, rope_theta
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(
        self, rows: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None, slots: int = 0
    ) -> SoftmaxState:
        """The state before the first token, for ``rows`` sequences; device and dtype default to the weights'.

        `forward` needs no ``slots``. `step_` writes into them and adds none: there must be as many as tokens that may be looked back on.
        """
        device = self.qkv_proj.weight.device if device is None else device
        dtype = self.qkv_proj.weight.dtype if dtype is None else dtype
        return SoftmaxState(
            keys=torch.zeros(rows, slots, self.num_heads, self.head_dim, device=device, dtype=dtype),
            values=torch.zeros(rows, slots, self.num_heads, self.head_dim, device=device, dtype=dtype),
            key_place=torch.full((rows, slots), EMPTY, device=device, dtype=torch.int64),
            place=torch.zeros(rows, device=device, dtype=torch.int64),
        )

    def forward(self, x: Hidden, *, state: SoftmaxState | None = None, cu_seqlens: CuSeqlens | None = None) -> tuple[Hidden, SoftmaxState]:
        """``x [B, T, D] -> y [B, T, D]`` and the state after it, which shares no storage with the given one.

        With ``cu_seqlens [documents + 1]``, B is 1 and the documents in x are apart; ``state`` then has one row a document.
        Raises ValueError for operands that do not fit.
        """
        check_hidden(x, self.hidden_size)
        position, place = positions(x, None if state is None else state.place, cu_seqlens)
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q, k = _rotate(q, position, self.rope_theta), _rotate(k, position, self.rope_theta)
        if cu_seqlens is None:
            o, keys, values, key_place = self._attend(q, k, v, position, state)
        else:
            attend: Callable[..., tuple[Tensor, ...]] = self._attend_new_documents if state is None else self._attend_documents
            if torch.compiler.is_compiling():  # lengths differ from call to call; as a decorator it would import torch._dynamo for all
                attend = torch.compiler.disable(attend)
            o, keys, values, key_place = attend(q, k, v, position, state, cu_seqlens)
        return self.out_proj(o.flatten(-2)), SoftmaxState(keys, values, key_place, place)

    @torch.no_grad()
    def step_(self, x: Hidden, state: SoftmaxState) -> Hidden:
        """One token of `forward`, ``[B, 1, D]``, for inference: overwrites the tensors of ``state``, which keep their size; no gradients.

        The token at place p goes to slot p mod slots, in place of the one that no later token may see.
        """
        check_hidden(x, self.hidden_size)
        position, place = positions(x, state.place, None)
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q, k = _rotate(q, position, self.rope_theta), _rotate(k, position, self.rope_theta)
        slot = position % state.key_place.shape[1]
        state.key_place.scatter_(1, slot, position)
        for kept, new in ((state.keys, k), (state.values, v)):
            kept.scatter_(1, slot[..., None, None].expand_as(new), new.to(kept.dtype))
        state.place.copy_(place)
        mask = self._visible(position, state.key_place).unsqueeze(1)
        q, k, v = (t.transpose(1, 2) for t in (q, state.keys.to(q.dtype), state.values.to(q.dtype)))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, past: SoftmaxState | None) -> tuple[Tensor, ...]:
        """Rows of equal length, after ``past``: the output, and the keys, values and places that later tokens may see."""
        key_place = position
        if past is not None:
            k, v = torch.cat([past.keys.to(k.dtype), k], dim=1), torch.cat([past.values.to(v.dtype), v], dim=1)
            key_place = torch.cat([past.key_place, position], dim=1)
        fresh = k.shape[1] == q.shape[1]
        mask = None if fresh and self.window_size is None else self._visible(position, key_place).unsqueeze(1)
        q, k_heads, v_heads = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k_heads, v_heads, attn_mask=mask, is_causal=mask is None).transpose(1, 2)
        kept = 0 if self.window_size is None else max(0, k.shape[1] - (self.window_size - 1))
        # The past was concatenated, so nothing here is the caller's; a clone lets the keys that left the window be freed.
        return o, *(t[:, kept:].clone() if kept else t for t in (k, v, key_place))

    def _visible(self, position: Int[Tensor, "R T"], key_place: Int[Tensor, "R S"]) -> Tensor:
        """May the query at each position see each key? ``[R, T, S]``."""
        distance = position.unsqueeze(-1) - key_place.unsqueeze(-2)
        visible = (distance >= 0) & (key_place != EMPTY).unsqueeze(-2)
        return visible if self.window_size is None else visible & (distance < self.window_size)

    def _attend_new_documents(self, q, k, v, position, state: None, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        """Documents without a past. Those of about one length go together, padded behind, where no token of theirs looks."""
        lie = layout(cu_seqlens, None if self.window_size is None else self.window_size - 1, q.device)
        outputs = [q.new_empty(0, self.num_heads, self.head_dim)]
        for (documents, length), members in zip(lie.groups, lie.tokens.split([n * m for n, m in lie.groups]), strict=True):
            Q, K, V = (t[0].index_select(0, members).unflatten(0, (documents, length)).transpose(1, 2) for t in (q, k, v))
            place = torch.arange(length, device=q.device).unsqueeze(0)
            mask = None if self.window_size is None else self._visible(place, place).unsqueeze(1)
            o = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask, is_causal=mask is None)
            outputs.append(o.transpose(1, 2).flatten(0, 1))
        o = torch.cat(outputs).index_select(0, lie.back).unsqueeze(0)
        return o, lie.spread(k, 0), lie.spread(v, 0), lie.spread(position, EMPTY)

    def _attend_documents(self, q, k, v, position, state: SoftmaxState, cu_seqlens: Tensor) -> tuple[Tensor, ...]:
        """Each document by itself, after its row of the state: a loop, as each looks back on another number of keys."""
        outputs, kept = [], []
        for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            filled = state.key_place[row] != EMPTY
            keys, values, key_place = (t[row, filled].unsqueeze(0) for t in state[:3])
            past = SoftmaxState(keys, values, key_place, state.place[row : row + 1])
            o, *tail = self._attend(q[:, start:end], k[:, start:end], v[:, start:end], position[:, start:end], past)
            outputs.append(o)
            kept.append(tail)
        slots = max((tail[0].shape[1] for tail in kept), default=0)
        keys, values, key_place = (
            torch.cat([_pad_left(t, slots, fill) for t in column])
            for column, fill in zip(zip(*kept, strict=True), (0, 0, EMPTY), strict=True)
        )
        return torch.cat(outputs, dim=1), keys, values, key_place

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, H={self.num_heads}, window_size={self.window_size}, rope_theta={self.rope_theta}"


def _pad_left(x: Tensor, slots: int, fill: int) -> Tensor:
    """``[1, n, …]`` to ``[1, slots, …]``, the new slots in front."""
    return F.pad(x, [0, 0] * (x.dim() - 2) + [slots - x.shape[1], 0], value=fill)


def _rotate(x: Float[Tensor, "B T H K"], position: Int[Tensor, "B T"], theta: float) -> Float[Tensor, "B T H K"]:
    """Turn pair i of every head by position·theta^(−2i/K); angles in float32, or float64 for float64 input."""
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (position.unsqueeze(-1).to(dtype) * frequency).unsqueeze(-2)  # [B, T, 1, K/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(dtype).split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
