import pytest

from fastweights.evaluate.statistics import mean_estimate
from fastweights.recipes.summary import summarise


def score(bits, documents=((3.0, 2.0), (5.0, 2.0))):
    estimate = {"value": bits, "low": bits - 0.1, "high": bits + 0.1}
    return {
        "length": 64,
        "bits_per_byte": estimate,
        "tail_bits_per_byte": estimate,
        "perplexity": 2**bits,
        "tokens": 4,
        "documents": 2,
        "per_document": documents,
    }


def row(label, bits, seed=0, size="s", **options):
    point = score(bits, **options)
    return {
        "label": label,
        "size": size,
        "seed": seed,
        "parameters": 10,
        "tokens": 100,
        "tokens_per_second": 50.0 + seed,
        "validation": point,
        "lengths": [point],
        "positions": [{"begin": 0, "end": 64, "bits_per_byte": point["bits_per_byte"]}],
        "training": [[50, bits + 1], [100, bits]],
        "sample": {"prompt": "", "text": label},
    }


def test_one_seed_is_compared_document_by_document():
    first, second = summarise([row("a", 2.0), row("b", 1.75, documents=((2.6, 2.0), (4.4, 2.0)))])
    assert first["validation"]["difference"] is None and first["validation"]["bits_per_byte"]["low"] == 1.9
    difference = second["validation"]["difference"]
    assert difference["value"] == pytest.approx(-1.0 / 4)  # −0.4 and −0.6 bits over 2 bytes each
    assert difference["high"] - difference["value"] == pytest.approx(12.7062 * 0.05)  # t of one degree of freedom, standard error 0.05
    assert second["lengths"][0]["difference"] == difference


def test_seeds_are_averaged_and_their_spread_is_the_interval():
    rows = [row(label, bits + seed / 10, seed) for label, bits in (("a", 2.0), ("b", 1.5)) for seed in range(3)]
    rows[4]["validation"]["bits_per_byte"]["value"] = 1.7
    first, second = summarise(rows)
    assert first["seeds"] == [0, 1, 2] and first["tokens_per_second"] == 51.0
    assert first["validation"]["bits_per_byte"] == mean_estimate([2.0, 2.1, 2.2])._asdict()
    assert second["validation"]["difference"] == mean_estimate([1.5 - 2.0, 1.7 - 2.1, 1.7 - 2.2])._asdict()
    assert second["training"] == [[50, pytest.approx(2.6)], [100, pytest.approx(1.6)]]
    assert second["positions"][0]["begin"] == 0 and second["positions"][0]["value"] == pytest.approx((1.5 + 1.7 + 1.7) / 3)


def test_differences_stay_within_a_size_and_a_seed():
    rows = [row("a", 2.0), row("b", 1.5), row("a", 3.0, size="l"), row("b", 3.5, size="l", documents=((9.0, 2.0), (9.0, 2.0)))]
    rows += [row("c", 1.0, seed=7)]
    entries = {(e["label"], e["size"]): e["validation"]["difference"] for e in summarise(rows)}
    assert entries["a", "l"] is None and entries["c", "s"] is None  # its baseline; no run of the baseline with its seed
    assert entries["b", "l"]["value"] == pytest.approx((18.0 - 8.0) / 4) and entries["b", "s"]["value"] == 0.0
