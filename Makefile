# Needs Python 3.11 or newer, make and git. Every target sets up what it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
JOBS   ?= 2
SITE   ?= mkdocs build --strict
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
RUNS   := $(VENV)/.ready-run
LONG   := $(VENV)/.ready-long

# Material for MkDocs otherwise prints an advertisement of its successor.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-long test-wheel check format docs bench bench-gpu reproduce clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(READY)  ## the environment that the tests need

demo: $(RUNS)  ## what four hospitals gain by learning together: a table and a page
	$(BIN)/fedstrata demo

test: $(READY)  ## quick tests and the examples in docstrings
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: $(READY)  ## tests that train a model or start processes
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "slow and not long"

test-long: $(LONG)  ## the nightly run: every fault, every experiment, trackers, FLARE, a browser, rates, sizes
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m long

test-wheel:  ## the built wheel, installed into an empty environment and tried
	PYTHON=$(PYTHON) .ci/wheel

check: $(READY)  ## format, lint, types, docstrings, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.check_docstrings
	$(BIN)/python -m docs.build
	$(BIN)/mkdocs build --strict --quiet -f build/mkdocs.yml

format: $(READY)  ## format the code, and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## build the documentation into build/site/
	$(BIN)/python -m docs.build
	$(BIN)/$(SITE) -f build/mkdocs.yml

bench: $(READY)  ## run the tracked benchmarks, and keep their ratios in benchmarks/results/
	$(BIN)/python -m benchmarks

bench-gpu: $(READY)  ## networks on one GPU beside programs by hand, in 9 minutes
	timeout 540 $(BIN)/python -m benchmarks.networks cnn gpt resnet limits forms --out build/networks.json

NAMES := $(subst _,-,$(basename $(notdir $(wildcard reproductions/[a-z]*.py))))
reproduce: $(RUNS)  ## the papers' tables and figures in full, which takes days without a GPU; NAMES=fedrzo-relu for one
	for name in $(NAMES); do $(BIN)/fedstrata reproduce $$name || exit 1; done

clean:  ## remove the environment, caches and builds
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# What runs it is a fraction of what tests and documents it: the demo does not wait for the rest.
$(RUNS): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[lab]'
	touch $@

# The stamp is older than pyproject.toml whenever the dependencies may have changed.
$(READY): pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(LONG): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[test-long]'
	touch $@
