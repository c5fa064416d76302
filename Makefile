# Everything a developer types. Each target installs what it needs into .venv, once per change of pyproject.toml.

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(if $(shell $(name) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(name))) python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help quickstart setup fmt check test test-fast bench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.runtime ## Fetch a small instruct model, train it on arithmetic, and show what it learned
	@$(BIN)/python tools/quickstart.py $(ARGS)

setup: $(VENV)/.development ## Install rljax with everything needed to work on it

fmt: $(VENV)/.development ## Format the code and fix what can be fixed without thought
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

check: $(VENV)/.development ## Lint, format, types and layers
	@echo "ruff check" && $(BIN)/ruff check .
	@echo "ruff format" && $(BIN)/ruff format --check .
	@echo "pyright" && $(BIN)/pyright
	@echo "lint-imports" && $(BIN)/lint-imports --no-cache --no-logo

test: $(VENV)/.development ## Run all tests; ARGS="-k sampler" for some of them
	@$(PYTEST) $(ARGS)

test-fast: $(VENV)/.development ## Run the tests that take less than 20 seconds each
	@$(PYTEST) -m "not slow" $(ARGS)

bench: $(VENV)/.development ## List the benchmarks; BENCH=name runs one, ARGS="..." are its options
ifdef BENCH
	@$(BIN)/python tools/bench/$(BENCH).py $(ARGS)
else
	@for file in $(sort $(filter-out %/sampling.py,$(wildcard tools/bench/*.py))); do \
	  printf '  make bench BENCH=%-16s %s\n' "$$(basename $$file .py)" "$$(sed -n '1s/^"""\(.*[^"]\)"*$$/\1/p' $$file)"; \
	done
endif

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rljax needs Python 3.11 or newer, and $(PYTHON) is not; name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) \
	  || { echo "Could not create $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.runtime: pyproject.toml | $(VENV)/.created
	@echo "Installing rljax and what it runs on into $(VENV) (0.8 GB, once)"
	@$(PIP) install --editable '.[gguf,tensorboard]'
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	@echo "Installing what tests and checks need into $(VENV) (another 1.7 GB, once)"
	@$(PIP) install --editable '.[dev,envs,gguf,parquet,qlora,tensorboard,test-oracle]'
	@touch $@
