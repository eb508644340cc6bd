"""The draws: known words, the right laws, and no draw that repeats where it must not."""

import itertools

import numpy as np
import pytest

from fastweights.tasks.draw import distinct, generator, integers, weighted_distinct, words


def test_the_words_are_pcg64s():
    # NumPy's own frozen test vectors start from this seed sequence: a change here means the platform's stream is not the published one.
    assert [int(w) for w in words(generator(0), 3)] == [11749869230777074271, 4976686463289251617, 755828109848996024]


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed is -1"):
        generator(-1)


def test_integers_are_uniform():
    counts = np.bincount(integers(generator(1), 7, 70_000), minlength=7)
    assert counts.sum() == 70_000 and ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # χ²₆, p = 0.001


def test_distinct_is_every_ordered_choice_equally_often():
    drawn = distinct(generator(2), 4, 2, 24_000)
    index = {pair: i for i, pair in enumerate(itertools.permutations(range(4), 2))}
    counts = np.bincount([index[tuple(pair)] for pair in drawn.tolist()], minlength=12)
    assert ((counts - 2000) ** 2 / 2000).sum() < 31.3  # χ²₁₁, p = 0.001


def test_distinct_may_take_all():
    assert (np.sort(distinct(generator(3), 50, 50, 20), axis=1) == np.arange(50)).all()


def test_weighted_distinct_is_successive_sampling():
    weights = np.array([1.0, 2.0, 5.0])
    drawn = weighted_distinct(generator(4), weights, 2, 40_000)
    chi2 = 0.0
    for a, b in itertools.permutations(range(3), 2):
        expected = 40_000 * weights[a] / 8 * weights[b] / (8 - weights[a])
        chi2 += ((drawn == [a, b]).all(1).sum() - expected) ** 2 / expected
    assert chi2 < 20.5  # χ²₅, p = 0.001
