# Everything a person or CI runs. Needs python3 (3.10 or newer, with its venv module), pip and make; `make help` lists the targets.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dev-environment
CONSTRAINTS := tests/constraints-dev.txt
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.bench-environment
BENCH_REQUIREMENTS := tests/benchmarks/requirements.txt
SHELL_SCRIPTS = .ci/run $(shell find deploy examples -name '*.sh' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help venv test check format demo bench faults clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

venv: $(STAMP) ## make or update the development environment in .venv

# torch goes first and alone: it is by far the largest, and a later failure then does not download it again.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) torch==2.13.0
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

test: venv ## run the tests (ARGS="-k name" are pytest's)
	$(BIN)/python -m pytest $(ARGS)

faults: venv ## run the tests that kill, fill and tear things
	$(BIN)/python -m pytest -m faults $(ARGS)

check: venv ## format, lint, types, import contracts, shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

format: venv ## let ruff format the code and repair what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: venv ## run examples/demo.py
	$(BIN)/python examples/demo.py $(ARGS)

# The peers need more than we do, so they get an environment of their own.
$(BENCH_STAMP): pyproject.toml $(BENCH_REQUIREMENTS)
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install -c $(BENCH_REQUIREMENTS) torch
	$(BENCH_VENV)/bin/python -m pip install -r $(BENCH_REQUIREMENTS) -e .
	@touch $@

bench: $(BENCH_STAMP) ## run tests/benchmarks (ARGS=--long)
	$(BENCH_VENV)/bin/python tests/benchmarks/bench.py $(ARGS)

clean: ## remove the environment, caches and build results
	rm -rf $(VENV) $(BENCH_VENV) bench-results build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
