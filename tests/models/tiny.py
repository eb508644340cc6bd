"""Models of a few thousand parameters, and how right a result must be."""

import pytest
import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.read import READ_RULES
from fastweights.write import WRITE_RULES

ALL_RULES = [f"{write}+{read}" for write in WRITE_RULES for read in READ_RULES if read != "projection" or write == "kla"]
HYBRIDS = {
    "softmax": {"mixer": "softmax"},
    "sliding": {"mixer": "softmax", "window_size": 5},
    "hybrid": {"mixer": ["kla+ccq", "softmax"], "window_size": 5},
    "two rules": {"mixer": ["gla+ccq", "gated_deltanet"]},
    "all of CCQ": {"mixer": "kla+ccq", "ccq_forget": "memory", "ccq_strength": "learned", "ccq_unit_keys": True},
    "1/t": {"mixer": "kla", "sequence_factor": "1/t"},
    "grouped, no conv, no MLP": {"mixer": "kla+ccq", "num_value_heads": 4, "conv_size": 0, "intermediate_size": 0},
}
EVERY_KIND = {rules: {"mixer": rules} for rules in ALL_RULES} | HYBRIDS
"""Name -> arguments of the config: every write with every read that sees the keys, and everything else a model can be made of."""
SOME_KINDS = {name: EVERY_KIND[name] for name in ("kla+ccq", "gla+raw", "hybrid", "sliding", "1/t")}
"""One of each sort of state, for what does not depend on the rule."""
PAIRWISE = [f"{write}+{('ccq', 'raw')[i % 2]}" for i, write in enumerate(WRITE_RULES)] + ["kla+ccq", *HYBRIDS]
"""Every write with one of the reads, and all else: what ``make test`` takes where the rule may matter."""
QUICK = ("kla+ccq", "hybrid", "two rules", "all of CCQ", "grouped, no conv, no MLP")
"""Between them, all that a state or a parameter can be."""


def kinds(names=EVERY_KIND, quick=QUICK):
    """Parameters for a test: the ``quick`` ones in ``make test``, the others in ``make test-full``."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]


VOCABULARY = 61


def tiny_config(**arguments) -> FastWeightsConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "expand_k": 0.5, "expand_v": 1.0, "intermediate_size": 48}
    # Weights as large as a trained model's: at 0.02 logits are nearly flat, and a wrong state would hardly show.
    return FastWeightsConfig(**{"vocab_size": VOCABULARY, "initializer_range": 0.3} | sizes | arguments)


def tiny_model(dtype=torch.float32, seed=0, **arguments) -> FastWeightsForCausalLM:
    """In evaluation mode; the same seed gives the same weights whatever dtype and backend."""
    torch.manual_seed(seed)
    model = FastWeightsForCausalLM(tiny_config(**arguments)).eval()
    for name, parameter in model.named_parameters():
        if "lambda_weight" in name:  # starts at 0, where λ would not depend on the query
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


def tokens(*shape, seed=1) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square, relative to the truth's."""
    truth = truth.double()
    return ((x.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()


class Truth:
    """The same weights three times: as they are used, as a plain float32 loop, and in float64."""

    def __init__(self, **arguments) -> None:
        self.model = tiny_model(**arguments)
        self.plain = tiny_model(backend="reference", **arguments)
        self.exact = tiny_model(backend="reference", dtype=torch.float64, **arguments)

    def of(self, f):
        """A check of results that should be ``f(model)``.

        They may be twice as far from ``f`` in float64 as ``f`` in float32 is, by the plain loop or not, and 8 ulps more.
        """
        exact = f(self.exact)
        allowed = 2 * max(error(f(self.plain), exact), error(f(self.model), exact)) + 8 * torch.finfo(torch.float32).eps

        def check(candidate: torch.Tensor) -> None:
            assert error(candidate, exact) <= allowed, f"error {error(candidate, exact):.2e}, allowed {allowed:.2e}"

        return check
