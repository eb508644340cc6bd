# Two commands for a newcomer: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OLDEST := .venv-oldest
TESTS  := $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: env demo lint style types test test-compile test-full test-oldest test-gpu test-gpu-memcheck clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV): two to five minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: env
	$(BIN)/fastweights demo

lint: style types

style: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: env
	$(BIN)/mypy

# The last two take a core each: on a fresh clone the types a minute and more.
test: style
	$(TESTS) -m "not full and not gpu and not compile"
	$(MAKE) --no-print-directory -O -j2 types test-compile

test-compile: env
	FASTWEIGHTS_SHAPE_CHECKS=0 $(TESTS) -n 0 -m "compile and not full and not gpu"

test-full: env
	$(TESTS) -m "full and not gpu and not compile"
	FASTWEIGHTS_SHAPE_CHECKS=0 $(TESTS) -n 0 -m "compile and full and not gpu"

# On a machine with a GPU: $(PYTHON) with a CUDA build of torch and the development extra. A shard a file, each at most 8 minutes.
test-gpu: $(patsubst tests/gpu/test_%_gpu.py,test-gpu-%,$(wildcard tests/gpu/test_*_gpu.py))

test-gpu-%:
	FASTWEIGHTS_SHAPE_CHECKS=0 timeout 480 $(PYTHON) -m pytest -n 8 --dist worksteal -q -m gpu tests/gpu/test_$*_gpu.py

test-gpu-memcheck:
	compute-sanitizer --tool memcheck --error-exitcode 9 $(PYTHON) -m pytest -n 0 -q -m gpu tests/gpu/test_memory_gpu.py

# The oldest transformers that pyproject.toml allows, in an environment of its own: the model is what depends on it.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -q tests/models tests/train -m "not full and not gpu and not compile"

$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	grep -v "^transformers" constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt torch numpy
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c $(OLDEST)/constraints.txt "transformers==5.17.*" -e ".[cli,train,lora,report,test]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
