import numpy as np
import pytest
import scipy.stats

from fastweights.evaluate.statistics import _student_t, mean_estimate, ratio_estimate


def test_students_quantile_against_scipy():
    for degrees in (1, 2, 3, 4, 5, 8, 15, 50, 1000):
        assert _student_t(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=1e-2)


def test_a_mean_is_the_usual_interval():
    values = np.random.default_rng(0).normal(2.0, 0.3, 12)
    low, high = scipy.stats.t.interval(0.95, 11, loc=values.mean(), scale=scipy.stats.sem(values))
    assert mean_estimate(values) == pytest.approx((values.mean(), low, high), rel=1e-4)


def test_a_ratio_covers_the_truth_19_times_in_20():
    """Documents of very different size, with a rate of their own each."""
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        sizes = random.lognormal(8, 0.7, 30)
        rates = 2.0 + random.normal(0, 0.4, 30)
        estimate = ratio_estimate(sizes * rates, sizes)
        hits += estimate.low <= 2.0 <= estimate.high
    assert 0.92 < hits / 2000 < 0.97


def test_one_document_has_no_interval_and_none_is_an_error():
    assert ratio_estimate([3.0, 0.0], [2.0, 0.0]) == (1.5, None, None)
    with pytest.raises(ValueError, match="nothing was observed"):
        ratio_estimate([0.0], [0.0])
