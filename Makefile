# Every target sets up what it needs: a Python 3.11 or later, make and a C compiler are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCKS  := requirements/engine.lock requirements/dev.lock
STAMP  := $(VENV)/.installed-$(shell cat $(LOCKS) pyproject.toml | cksum | tr -d ' ')

.PHONY: help setup up demo test check bench-return bench-lease bench-router bench-soak clean
help:
	@echo "make up            two engines, a router, a conversation; then serves until Ctrl-C"
	@echo "make demo          the same, and exits after the conversation with a status"
	@echo "make test          every test, real engines too (about 20 minutes on two cores)"
	@echo "make check         lint, types, layers, tidiness (seconds)"
	@echo "make bench-return  the figures of the README, with targets and verdicts (about 35 minutes)"
	@echo "make bench-lease   what leases cost and bring, with targets and verdicts (about an hour)"
	@echo "make bench-router  the router beside vllm-router and SMG, with targets and verdicts (about 10 minutes)"
	@echo "make bench-soak    an hour of traffic with faults, simulated engines, in ten minutes, with targets and verdicts"
	@echo "make clean         removes the environment and caches"

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvloop needs Python 3.11 or later; set PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV): about 160 packages, 3 GB, two minutes" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'pip>=24'
	@for lock in $(LOCKS); do \
	  echo "installing $$lock" >&2; \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r $$lock || exit 1; \
	done
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

up: setup
	@$(BIN)/kvloop up

demo: setup
	@$(BIN)/kvloop up --demo-only

test: setup
	@$(BIN)/python -m compileall -q src  # tests start many processes, and may not be allowed to keep bytecode
	@$(BIN)/pytest

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/pytest tests/test_tidy.py tests/test_layers.py

bench-return: setup
	@$(BIN)/python -m kvloop.bench.return_path

bench-lease: setup
	@$(BIN)/python -m kvloop.bench.lease

bench-router: setup
	@$(BIN)/python -m kvloop.bench.router_peers

bench-soak: setup
	@$(BIN)/python -m kvloop.bench.soak

clean:
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
