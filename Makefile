# make setup, make train, make test: everything a fresh machine needs. EXTRA=cuda12 installs for GPUs.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
VENV_PARITY ?= .venv-parity
# For compiling without GPUs: JAX's CUDA wheels, some 6 GB.
VENV_AOT ?= .venv-aot
BIN := $(VENV)/bin
EXTRA ?= cpu
# For make parity: torch's CPU build is 'torch --index-url URL-OF-THE-CPU-INDEX', or torch==VERSION+cpu.
TORCH ?= torch
WORKDIR ?= runs/quickstart
CONFIG ?= experiments/configs/quickstart.gin
ARGS ?=
# Processes that share the tests, each of some 4 GB; a file is of one process, for its tests share what they compile.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup setup-dev train sample evaluate test test-all lint parity bench bench-links bench-sampling bench-torch wheel aot setup-aot clean

setup: $(VENV)/.installed-$(EXTRA)
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxdit needs Python 3.11 or newer on PATH (or make PYTHON=/path/to/python)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

train: setup
	$(BIN)/python -m experiments.train --config $(CONFIG) --workdir $(WORKDIR) $(ARGS)

evaluate: setup
	$(BIN)/python -m experiments.evaluate --workdir $(WORKDIR) $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not full" $(ARGS)

test-all: lint
	$(PYTEST) $(ARGS)

# Compares with diffusers and transformers in an environment of its own: torch is large. Its CPU build if there is one.
parity: $(VENV_PARITY)/.installed
	$(VENV_PARITY)/bin/python -m tests.parity

# Speed beside diffusers on torch, on this CPU.
bench-torch: $(VENV_PARITY)/.installed
	$(VENV_PARITY)/bin/python -m tests.parity.bench

$(VENV_PARITY)/.installed: pyproject.toml
	test -x $(VENV_PARITY)/bin/python || $(PYTHON) -m venv $(VENV_PARITY)
	$(VENV_PARITY)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV_PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu]' diffusers accelerate peft transformers
	touch $@

bench: setup-dev
	$(BIN)/python -m experiments.bench $(ARGS)

# Attention over emulated machines with slow links: needs root and iproute2.
bench-links: setup-dev
	$(BIN)/python -m experiments.bench_links $(ARGS)

# The engine's algorithms, and the service under load.
bench-sampling: setup-dev
	$(BIN)/python -m experiments.bench_sampling $(ARGS)

setup-aot:
	$(MAKE) VENV=$(VENV_AOT) $(VENV_AOT)/.installed-aot

aot: setup-aot
	$(VENV_AOT)/bin/python -m pytest tests/aot/check_*.py
	$(VENV_AOT)/bin/python -m experiments.aot_sequence --out docs/benchmarks.md
	$(VENV_AOT)/bin/python -m experiments.aot_shipped --out docs/aot.json --figures docs/images

wheel: setup-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
