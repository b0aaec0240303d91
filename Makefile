# One door to everything. `make` alone lists what there is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?=
# Test processes side by side; more than a few of them disturb what the end-to-end tests wait for.
JOBS ?= 2
# What the venv is made from; a change here makes it anew.
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-vllm check format test test-fast test-vllm docs bench bench-profile workers clean

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

demo-vllm: $(STAMP) ## the same on two real vLLM engines, on the CPU; installs them when missing
	$(BIN)/python tests/support/vllm/run.py

docs: $(STAMP) ## renew the generated parts of the reference
	$(BIN)/python docs/generate.py

bench: $(STAMP) ## what the proxy costs beside its peers: CELLS=… TARGETS=… ROUNDS=… narrow it
	$(BIN)/python -m tests.bench.compare

bench-profile: $(STAMP) ## where the proxy's time goes under small requests
	$(BIN)/python -m tests.bench.profile

workers: $(STAMP) ## the bars of the worker's side; with the real vLLM stage where its engine is installed
	$(BIN)/python tests/e2e/measure_workers.py

check: $(STAMP) ## format, lint, types, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP) ## put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP) ## all tests; the real vLLM stage too where its engine is installed (make test-vllm installs it)
	$(BIN)/pytest -m "not vllm" -n $(JOBS) --dist loadfile
	@if bash tests/support/vllm/setup.sh --installed >/dev/null; then $(MAKE) --no-print-directory test-vllm; \
	else echo "real vLLM stage: not run, its engine is not installed; make test-vllm installs it (2 GB) and runs it"; fi

test-vllm: $(STAMP) ## the tests that need two real vLLM engines, on the CPU; installs them when missing
	VLLM_PYTHON=$$(bash tests/support/vllm/setup.sh | tail -n 1) $(BIN)/pytest -m vllm tests/e2e

test-fast: $(STAMP) ## the quick ones, for the loop while writing
	$(BIN)/pytest -m "not vllm and not slow" -n $(JOBS) tests/unit tests/property tests/contract

clean: ## remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
