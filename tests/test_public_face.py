"""What ``import fastweights`` gives, and what it does not cost."""

import subprocess
import sys
from pathlib import Path

import pytest

import fastweights

ROOT = Path(__file__).parents[1]


def test_at_most_ten_names_and_all_of_them_are_there():
    assert len(fastweights.__all__) <= 10 and len(set(fastweights.__all__)) == len(fastweights.__all__)
    assert set(fastweights.__all__) <= set(dir(fastweights))
    for name in fastweights.__all__:
        value = getattr(fastweights, name)
        assert value is getattr(fastweights, name) and value is vars(fastweights)[name]
    with pytest.raises(AttributeError, match="'fastweights' has no attribute 'kaczmarzz'"):
        fastweights.kaczmarzz  # noqa: B018


def test_the_models_package_too():
    import fastweights.models as models

    for name in models.__all__:
        assert getattr(models, name).__name__ == name
    assert set(models.__all__) <= set(dir(models))
    with pytest.raises(AttributeError, match="no attribute 'FastWeightsTokenizer'"):
        models.FastWeightsTokenizer  # noqa: B018


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, code + done.stderr


def test_importing_loads_neither_torch_nor_triton_nor_transformers():
    run("import sys, fastweights; loaded = {'torch', 'triton', 'transformers'} & set(sys.modules); assert not loaded, loaded")


def test_the_functions_and_the_layer_load_neither_triton_nor_transformers():
    """Importing and building; torch itself may load Triton when a custom op first runs."""
    run("""
import sys
from fastweights import READ_RULES, WRITE_RULES, FastWeightAttention, ccq_query, decay_memory, delta_memory, kaczmarz
for mixer in ("kla+ccq", "gla"):
    FastWeightAttention(hidden_size=32, num_heads=2, mixer=mixer)
loaded = {'triton', 'transformers', 'torch._dynamo'} & set(sys.modules)
assert not loaded, loaded
""")


@pytest.mark.full
def test_a_type_checker_knows_the_names(tmp_path):
    """The names are lazy at run time only; and one that does not exist is still an error."""
    good = "".join(f"from fastweights import {name}\n" for name in fastweights.__all__)
    (tmp_path / "user.py").write_text(good + "from fastweights import kaczmarzz\nreveal_type(kaczmarz)\nreveal_type(WRITE_RULES)\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--follow-imports=silent"]
    output = subprocess.run([*command, str(tmp_path / "user.py")], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    errors = [line for line in output.splitlines() if ": error:" in line]
    assert len(errors) == 1 and 'no attribute "kaczmarzz"' in errors[0], output
    assert "type[fastweights.write.base.WriteRule]" in output and "def (k:" in output, output
