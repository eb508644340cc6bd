import pytest

from fastweights.recipes.task_rows import KEPT, ORIGIN, kept_rows, mean_accuracy, spread, standings_table
from fastweights.records import append_rows


def score(accuracy, *, length, stratum=None, value=None, **more):
    return {"length": length, "stratum": stratum, "value": value, "asked": 100, "accuracy": accuracy, "low": 0.5, "high": 1.0} | more


def standing(label="kla", *, state=1024, **more):
    accuracy = [score(0.98, length=64, **more), score(0.125, length=1024, **more), score(0.1, length=1024, stratum="gap", value=2, **more)]
    return dict(label=label, state_floats=state, learning_rate=10**-2.5, seeds=[0, 1], train_accuracy=0.999, accuracy=accuracy)


def test_what_is_kept_of_a_run(tmp_path):
    accuracy = [score(0.9, length=64), score(0.8, length=64, stratum="gap", value=2), score(0.7, length=64, stratum="seen", value=1)]
    run = dict.fromkeys((*KEPT, *ORIGIN), 1) | {"run": "a", "accuracy": accuracy, "training": [[200, 2.5, 0.25, 1.0]]}
    append_rows(tmp_path / "results.jsonl", [run])
    (row,) = kept_rows(tmp_path, strata=("seen",), width=64)
    assert row.keys() == {"width", *KEPT, *ORIGIN, "accuracy", "n", "training"}
    assert row["accuracy"] == [accuracy[0], accuracy[2]] and row["n"] == 100 and row["training"] == [[200, 0.25]] and row["width"] == 64
    assert kept_rows(tmp_path / "not yet") == []


def test_a_table_of_standings_by_hand():
    assert mean_accuracy(standing()) == pytest.approx(55.25) and spread(score(0.98, length=64)) == "98.0 (50.0–100.0)"
    lines = standings_table("d 64", [standing(pairs=4), standing("softmax", state=None, pairs=4)], mean=True, names={"kla": "ours"})
    assert lines == [
        "| d 64 | state, floats | rate | seeds | in training | mean | 64 | 1,024 |",
        "|---|---|---|---|---|---|---|---|",
        "| ours | 1,024 | 0.0032 | 2 | 99.9 | 55.2 | 98.0 (50.0–100.0) | 12.5 (50.0–100.0) |",
        "| softmax | grows | 0.0032 | 2 | 99.9 | 55.2 | 98.0 (50.0–100.0) | 12.5 (50.0–100.0) |",
    ]
    mixed = standing() | {"accuracy": [score(0.5, length=64, pairs=4), score(0.5, length=64, pairs=8)]}
    assert standings_table("d", [mixed], mean=False)[0] == "| d | state, floats | rate | seeds | in training | 64, 4 | 64, 8 |"
    assert standings_table("d", [], mean=False) == ["| d | state, floats | rate | seeds | in training |", "|---|---|---|---|---|"]
