# Two commands for a newcomer: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS  := $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: env demo test test-full lint clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: env
	$(BIN)/fastweights demo

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(TESTS) -m "not full and not gpu and not compile"
	FASTWEIGHTS_SHAPE_CHECKS=0 $(TESTS) -n 0 -m "compile and not full and not gpu"

test-full: env
	$(TESTS) -m "full and not gpu and not compile"
	FASTWEIGHTS_SHAPE_CHECKS=0 $(TESTS) -n 0 -m "compile and full and not gpu"

clean:
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
