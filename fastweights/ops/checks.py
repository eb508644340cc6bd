"""Every ValueError about the operands of an op. Shapes, ranks, dtypes and devices are checked always; values (the sign of log_decay, the
bounds in cu_seqlens) on CPU tensors always, on other devices only with ``validate=True``, because reading them waits for the device.
Under torch.compile values cannot be read, and are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.notation import Coefficients

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_shape(name: str, x: Tensor, letters: str, sizes: dict[str, int]) -> None:
    """``letters`` names the dimensions of x, as ``"B T Hk K"``; ``sizes`` knows some of them, and learns the others from x."""
    dims = letters.split()
    if x.dim() != len(dims) or any(sizes.get(d, n) != n for d, n in zip(dims, x.shape, strict=True)):
        known = ", ".join(f"{d} = {sizes[d]}" for d in dims if d in sizes)
        raise ValueError(f"{name} must be [{', '.join(dims)}]{' with ' + known if known else ''}; got {_shape(x)}")
    sizes.update(zip(dims, x.shape, strict=True))


def check_per_head(name: str, x: Tensor, sizes: dict[str, int], heads: tuple[str, ...] = ("Hk", "Hv")) -> None:
    """A number per token and head, ``[B, T, Hk]`` or ``[B, T, Hv]``; ``heads`` says which are allowed."""
    B, T = sizes["B"], sizes["T"]
    if tuple(x.shape) not in [(B, T, sizes[h]) for h in heads]:
        allowed = " or ".join(f"[B, T, {h}] = [{B}, {T}, {sizes[h]}]" for h in heads)
        raise ValueError(f"{name} must be {allowed}; got {_shape(x)}")


def check_dtype(name: str, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(_dtype, allowed))}; got {_dtype(x.dtype)}")


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        raise ValueError("all tensors must be on one device; got " + ", ".join(f"{name} on {device}" for name, device in devices.items()))


def check_log_decay_sign(log_decay: Tensor, validate: bool = False) -> None:
    if readable(log_decay, validate) and bool((log_decay > 0).any()):
        raise ValueError(f"log_decay must be ≤ 0 (the log of a forget gate in [0, 1]); its largest value is {log_decay.max().item():.6g}")


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, tokens: int, validate: bool = False) -> None:
    """Documents packed into one row: ``cu_seqlens[i] : cu_seqlens[i + 1]`` are the tokens of document i; documents may be empty."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [documents + 1] with at least one document; got {_shape(cu_seqlens)}")
    check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if batch != 1:
        raise ValueError(f"cu_seqlens packs all documents into one row, so the batch must be 1; got B = {batch}")
    if not readable(cu_seqlens, validate):
        return
    if (first := int(cu_seqlens[0])) != 0:
        raise ValueError(f"cu_seqlens must start at 0; got cu_seqlens[0] = {first}")
    if (last := int(cu_seqlens[-1])) != tokens:
        raise ValueError(f"cu_seqlens must end at T = {tokens}; got cu_seqlens[-1] = {last}")
    falls = cu_seqlens.diff() < 0
    if bool(falls.any()):
        i = int(falls.nonzero()[0])
        raise ValueError(f"cu_seqlens must not decrease; got cu_seqlens[{i}] = {cu_seqlens[i]} > cu_seqlens[{i + 1}] = {cu_seqlens[i + 1]}")


def check_memory(
    family: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    validate: bool = False,
) -> None:
    """All operands of `fastweights.ops.delta` or `decay` (``family``)."""
    sizes: dict[str, int] = {}
    check_shape("q", q, "B T Hk K", sizes)
    check_shape("k", k, "B T Hk K", sizes)
    check_shape("v", v, "B T Hv V", sizes)
    if sizes["Hk"] == 0 or sizes["Hv"] % sizes["Hk"]:
        raise ValueError(f"value heads must be a multiple of key heads; got Hv = {sizes['Hv']} (v) and Hk = {sizes['Hk']} (q, k)")
    check_dtype("q", q, DTYPES)
    check_dtype("k", k, (q.dtype,))
    check_dtype("v", v, (q.dtype,))
    precise = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    for name, x in coef._asdict().items():
        if x is not None:
            check_dtype(name, x, precise)

    if coef.beta is not None:
        if family != "delta":
            raise ValueError(f"only the delta family has a beta; got beta {_shape(coef.beta)} for {family}")
        check_per_head("beta", coef.beta, sizes, ("Hv",))
    if coef.key_scale is not None:
        check_per_head("key_scale", coef.key_scale, sizes)
    if coef.value_scale is not None:
        check_per_head("value_scale", coef.value_scale, sizes)
    if coef.query_scale is not None:
        check_per_head("query_scale", coef.query_scale, sizes)
    if coef.log_decay is not None:
        if coef.log_decay.dim() != 4:
            check_per_head("log_decay", coef.log_decay, sizes, ("Hv",))
        elif family == "delta":
            raise ValueError(f"the delta family forgets per head: log_decay must be [B, T, Hv]; got {_shape(coef.log_decay)} per channel")
        else:
            check_shape("log_decay", coef.log_decay, "B T Hk K", sizes)
        check_log_decay_sign(coef.log_decay, validate)

    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"], validate)
    if state is not None:
        sizes["R"] = sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1
        check_shape("state", state, "R Hv K V", sizes)
        check_dtype("state", state, (torch.float64,) if q.dtype == torch.float64 else (torch.float32,))
    check_same_device(q=q, k=k, v=v, **coef._asdict(), state=state)


def readable(x: Tensor, validate: bool) -> bool:
    """May the values of x be read here?"""
    return (x.device.type == "cpu" or validate) and not torch.compiler.is_compiling()


def _shape(x: Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
