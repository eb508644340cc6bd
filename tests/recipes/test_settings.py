import pytest

from fastweights.recipes.demo import DEMO
from fastweights.recipes.settings import CompareSettings, EvaluateSettings, SizeChanges, Variant
from fastweights.train.presets import SIZES, TrainSettings


def test_a_variant_is_a_mixer_a_pattern_and_options():
    plain = Variant.parse("kla+ccq")
    assert plain == ("kla+ccq", ("kla+ccq",), {}) and plain.mixer(4) == "kla+ccq"
    rich = Variant.parse("kla+ccq,softmax:eta_max=2:ccq_forget=none:q_norm=l2:relaxation=true:window_size=None")
    assert rich.mixer(3) == ["kla+ccq", "softmax", "kla+ccq"]
    assert rich.options == {"eta_max": 2, "ccq_forget": "none", "q_norm": "l2", "relaxation": True, "window_size": None}
    for bad in ("kla:eta_max", "kla:=2", "kla:eta_max=", "kla:"):
        with pytest.raises(ValueError, match="is not an option of the form name=value"):
            Variant.parse(bad)
    with pytest.raises(ValueError, match="gives eta_max twice"):
        Variant.parse("kla:eta_max=2:expand_v=4:eta_max=1")
    wide = Variant.parse("kla,softmax:eta_max=2:expand_v=4:num_hidden_layers=3").config(SIZES["5m"], vocab_size=258)
    assert (wide["expand_v"], wide["expand_k"], wide["eta_max"], wide["vocab_size"]) == (4, SIZES["5m"].expand_k, 2, 258)
    assert wide["mixer"] == ["kla", "softmax", "kla"] and wide["num_hidden_layers"] == 3
    for bad, message in [
        ("kla:mixer=gla", "cannot set mixer"),
        ("kla:vocab_size=9:bos_token_id=1", "cannot set vocab_size, bos_token_id"),
        ("softmax:expand_v=4:window_size=9", "sets expand_v, which softmax attention does not have"),
        ("kla:self=3:dtype=bf16", "cannot set self, dtype: options are those of the rules and of the model's shape"),
        ("kla,gla:num_hidden_layers=many", "num_hidden_layers='many' in 'kla,gla:num_hidden_layers=many' is not a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            Variant.parse(bad).config(SIZES["5m"], vocab_size=258, bos_token_id=0)


def test_changes_replace_what_they_name():
    size = SizeChanges(hidden_size=64, conv_size=0).apply(SIZES["5m"])
    assert (size.hidden_size, size.conv_size, size.num_hidden_layers) == (64, 0, SIZES["5m"].num_hidden_layers)
    assert SizeChanges().apply(SIZES["5m"]) == SIZES["5m"]


def test_the_curve_goes_from_the_training_length_to_the_longest():
    settings = CompareSettings(train=TrainSettings(sequence_length=128), evaluate=EvaluateSettings(longest=16))
    assert settings.lengths == [128, 256, 512, 1024, 2048]
    assert DEMO.lengths[-1] == 16 * DEMO.train.sequence_length


def test_impossible_settings():
    for bad, message in [
        (dict(mixers=()), r"mixers=\[\]: give at least one"),
        (dict(seeds=(1, 1)), r"seeds=\[1, 1\]: give at least one, and none twice"),
        (dict(sizes=("9b",)), "size '9b' is not one of 0.3m, 1m, 5m, 25m"),
        (dict(processes=-1), "processes=-1 is negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            CompareSettings(**bad)
    for bad, message in [
        (dict(longest=12), "longest=12 is not a power of two"),
        (dict(length_tokens=0), "length_tokens=0 is not positive"),
        (dict(sample_tokens=-1), "sample_tokens=-1 is negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            EvaluateSettings(**bad)
