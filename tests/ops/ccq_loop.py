"""What CCQ's tests share: its recursion as a loop, which is the truth in float64, operands, and outputs with all gradients by name."""

from itertools import pairwise

import torch

from fastweights.notation import CCQState


def loop(q, k, lam, *, key_scale=None, log_decay=None, mask=None, unit_keys=False, eps=1e-6, state=None, cu_seqlens=None):
    """The recursion of DESIGN's section on CCQ, token by token; Σ is made symmetric, as the op's is."""
    if key_scale is not None:
        k = k * key_scale.unsqueeze(-1)
    if unit_keys:
        k = k / (k.square().sum(-1, keepdim=True) + eps).sqrt()
    B, T, H, K = k.shape
    edges = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = B if cu_seqlens is None else len(edges) - 1
    if state is None:
        state = CCQState(k.new_zeros(rows, H, K, K), k.new_zeros(rows, H, K), k.new_zeros(rows, H))
    outputs, finals = [], []
    for i, (start, end) in enumerate(pairwise(edges)):
        C, mean, w = state if cu_seqlens is None else (x[i : i + 1] for x in state)
        for t in range(start, end):
            counts = torch.ones(B, dtype=torch.bool, device=k.device) if mask is None else mask[:, t]
            left = w if log_decay is None else log_decay[:, t].exp() * w
            d, new = k[:, t] - mean, left + 1
            spread = (left / new)[..., None, None] * d.unsqueeze(-1) * d.unsqueeze(-2)
            faded = C if log_decay is None else log_decay[:, t].exp()[..., None, None] * C
            C = torch.where(counts[:, None, None, None], faded + spread, C)
            mean = torch.where(counts[:, None, None], mean + d / new.unsqueeze(-1), mean)
            w = torch.where(counts[:, None], new, w)
            sigma = (C + C.mT) / 2 / torch.where(w > 0, w, 1)[..., None, None]
            outputs.append(q[:, t] - lam[:, t].unsqueeze(-1) * (sigma @ q[:, t].unsqueeze(-1)).squeeze(-1))
        finals.append(((C + C.mT) / 2, mean, w))
    o = torch.stack(outputs, dim=1) if outputs else q
    return o, CCQState(*(torch.cat(parts) for parts in zip(*finals, strict=True)))


def draw(T=70, B=2, H=2, K=6, dtype=torch.float64, forget=False, state=False, rows=None, offset=1.0):
    """Operands by name. Keys lie off the origin; decays are a model's, with a few zeros and a −50."""
    rows = rows or B

    def randn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K) + offset, "lam": torch.rand(B, T, H, dtype=torch.float64)}
    x = {name: t.to(dtype) for name, t in x.items()}
    real = torch.float64 if dtype == torch.float64 else torch.float32
    if forget:
        log_decay = -torch.rand(B, T, H, dtype=torch.float64) * 0.3
        log_decay[torch.rand(B, T, H) < 0.3] = 0
        log_decay[:, T // 2 : T // 2 + 1] = -50
        x["log_decay"] = log_decay.to(real)
    if state:
        root = randn(rows, H, K, K)
        x["state"] = CCQState(root @ root.mT, randn(rows, H, K) + offset, torch.rand(rows, H, dtype=torch.float64) * 5 + 1)
        x["state"] = CCQState(*(t.to(real) for t in x["state"]))
    return x


def cast(x, dtype):
    def to(t):
        return CCQState(*map(to, t)) if isinstance(t, CCQState) else t.to(dtype) if torch.is_floating_point(t) else t

    return {name: to(t) if torch.is_tensor(t) or isinstance(t, CCQState) else t for name, t in x.items()}


def differentiate(form, x):
    """Outputs and gradients by name. The gradient of C is known only up to an antisymmetric part, so its symmetric part is given."""
    leaves = {name: t for name, t in x.items() if torch.is_tensor(t) and torch.is_floating_point(t)}
    leaves |= {f"state.{name}": t for name, t in x["state"]._asdict().items()} if "state" in x else {}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    given = {**x, **{name: t for name, t in leaves.items() if "." not in name}}
    if "state" in x:
        given["state"] = CCQState(*(leaves[f"state.{name}"] for name in CCQState._fields))
    o, state = form(**given)
    generator = torch.Generator().manual_seed(1)
    outputs = {"q'": o, **state._asdict()}
    upstream = [torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype) for out in outputs.values()]  # exact in all dtypes
    flows = [(out, up) for out, up in zip(outputs.values(), upstream, strict=True) if out.requires_grad]
    grads = torch.autograd.grad([f[0] for f in flows], list(leaves.values()), [f[1] for f in flows], allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves.values(), strict=True)]
    named = {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}
    if "state" in x:
        C = named["grad state.covariance"]
        named["grad state.covariance"] = (C + C.mT) / 2
    return {name: t.detach() for name, t in (outputs | named).items()}
