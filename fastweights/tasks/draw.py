"""Random draws that are the same everywhere: one explicit generator, raw words, integer arithmetic.

Neither ``torch.Generator`` nor NumPy's distributions promise the same numbers in the next release or on another device. NumPy's *bit
generators* do (NEP 19 freezes their streams and their seeding). So every function here takes an ordinary ``numpy.random.Generator``,
reads only its raw 64-bit words, and makes the distribution itself. Functions of a math library occur once, the logarithm and power behind
`weighted_distinct`, and their result is only compared: a last-bit difference between two libraries would swap two places about once in
10¹³ draws.
"""

from __future__ import annotations

import numpy as np

UInt64 = np.uint64


def generator(seed: int) -> np.random.Generator:
    """The generator that every task draws from: PCG64, named outright because ``default_rng`` may change its algorithm."""
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")
    return np.random.Generator(np.random.PCG64(seed))


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Raw 64-bit words ``[*shape]``, uint64."""
    return rng.bit_generator.random_raw(int(np.prod(shape))).reshape(shape)  # type: ignore[attr-defined]


def scale_down(raw: np.ndarray, high: int | np.ndarray) -> np.ndarray:
    """Words to integers in ``[0, high)``, int64: the top 32 bits times ``high``, shifted down. Each value is within high / 2³² of
    equally likely."""
    return ((raw >> UInt64(32)) * np.asarray(high, dtype=UInt64) >> UInt64(32)).astype(np.int64)


def integers(rng: np.random.Generator, high: int, *shape: int) -> np.ndarray:
    """Integers in ``[0, high)`` with replacement ``[*shape]``, int64; ``high`` ≤ 2³²."""
    return scale_down(words(rng, *shape), high)


def distinct(rng: np.random.Generator, high: int, count: int, rows: int) -> np.ndarray:
    """Per row ``count`` different integers of ``[0, high)`` in random order ``[rows, count]``, int64: the head of a Fisher-Yates
    shuffle."""
    pool = np.tile(np.arange(high, dtype=np.uint16 if high <= 1 << 16 else np.int64), (rows, 1))  # small: making it is most of the work
    place = np.arange(count)[:, None] + scale_down(words(rng, rows, count).T, high - np.arange(count)[:, None])
    flat, start = pool.reshape(-1), high * np.arange(rows)
    for i, other in enumerate(start + place):
        head = start + i
        flat[head], flat[other] = flat[other], flat[head]
    return pool[:, :count].astype(np.int64)


def weighted_distinct(rng: np.random.Generator, weights: np.ndarray, count: int, rows: int) -> np.ndarray:
    """Per row ``count`` different places of ``weights``, drawn one after another with probability ∝ weight ``[rows, count]``, int64.

    Every place gets an exponential waiting time of rate ``weight``; the order in which they ring is the order of successive draws
    without replacement (Efraimidis and Spirakis 2006).
    """
    uniform = ((words(rng, rows, len(weights)) >> UInt64(11)) + UInt64(1)).astype(np.float64) * 2.0**-53  # (0, 1]
    return np.argsort(-np.log(uniform) / weights, axis=1, kind="stable")[:, :count]
