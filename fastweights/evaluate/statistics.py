"""How sure a measured number is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray


class Estimate(NamedTuple):
    """A value and its 95 % confidence interval; None where a single observation says nothing about the spread."""

    value: float
    low: float | None
    high: float | None


class Growth(NamedTuple):
    """How a quantity grows with another: by the power ``exponent``, with its standard error and 95 % interval."""

    exponent: float
    error: float | None
    low: float | None
    high: float | None


def growth(x: Numbers, y: Numbers) -> Growth:
    """Of y with x, both positive: the least-squares line through their logarithms. Two points have a line and no spread."""
    u, v = np.log(np.asarray(x, np.float64)), np.log(np.asarray(y, np.float64))
    u, v = u - u.mean(), v - v.mean()
    if not u @ u > 0:
        raise ValueError(f"a growth needs at least two different places; got {list(x)}")
    exponent = float(u @ v / (u @ u))
    if len(u) == 2:
        return Growth(exponent, None, None, None)
    left = v - exponent * u
    error = math.sqrt(float(left @ left) / (len(u) - 2) / float(u @ u))
    reach = _student_t(len(u) - 2) * error
    return Growth(exponent, error, exponent - reach, exponent + reach)


def mean_estimate(values: Numbers) -> Estimate:
    """Mean of independent observations."""
    return ratio_estimate(values, [1.0] * len(values))


def ratio_estimate(numerators: Numbers, denominators: Numbers) -> Estimate:
    """Σ numerators / Σ denominators over independent clusters (documents), such as nats over bytes.

    Tokens of one document resemble each other, so the spread is taken over documents, not tokens: the linearised (delta-method) variance of
    a ratio, with Student's t for few documents. Clusters with a zero denominator count for nothing.
    """
    y, x = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    y, x = y[x > 0], x[x > 0]
    n = len(x)
    if n == 0:
        raise ValueError("nothing was observed: every denominator is 0")
    ratio = float(y.sum() / x.sum())
    if n == 1:
        return Estimate(ratio, None, None)
    deviations = y - ratio * x
    error = math.sqrt(n / (n - 1) * float(deviations @ deviations)) / float(x.sum())
    reach = _student_t(n - 1) * error
    return Estimate(ratio, ratio - reach, ratio + reach)


def _student_t(degrees: int) -> float:
    """The 97.5 % quantile: exact for 1 and 2 degrees of freedom, else the Cornish–Fisher series around the normal, right to 1e-2."""
    if degrees == 1:
        return math.tan(math.pi * 0.475)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))
    z, n = NormalDist().inv_cdf(0.975), degrees
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
