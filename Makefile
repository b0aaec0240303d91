# One door to everything. `make` alone lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?=
# What the venv is made from; a change here makes it anew.
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-fast test-vllm demo demo-vllm docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the virtual environment with everything in it

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[embedded,gpu]' --group dev
	@touch $@

demo: $(STAMP) ## the whole product on this machine, no GPU: SECONDS=20 ends it after the table
	@$(BIN)/homing-worker demo $(if $(SECONDS),--seconds $(SECONDS))

check: $(STAMP) ## format, lint, types, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP) ## all tests that need no engine
	$(BIN)/pytest -m "not vllm"

test-fast: $(STAMP) ## the quick ones, for the loop while writing
	$(BIN)/pytest -m "not vllm and not slow" tests/unit tests/property tests/contract

clean: ## remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
