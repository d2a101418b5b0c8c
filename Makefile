# The commands of this project. `make test` and `make demo` set everything up on a fresh machine.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Tests share nothing, so two workers halve the wait; set JOBS=0 for one process with a debugger.
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types imports unit examples goldens pictures bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Constraints hold for the build environment too, hence the variable and not only the option.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[torch,dev]'
	@touch $@

demo: $(READY) ## trace a small transformer, forward and backward, and print the views
	$(BIN)/sightline demo

test: lint types imports unit examples ## lint, types, import directions, tests

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy --strict
	$(BIN)/mypy

imports: $(READY) ## who may import whom
	$(BIN)/python checks/imports.py

unit: $(READY) ## the tests alone; ARGS="-k fold -x" for some of them
	$(BIN)/python -m pytest -n $(JOBS) tests $(ARGS)

# In one process: a worker's own frames would stand above the examples' in what the views print.
examples: $(READY) ## the examples in the docstrings
	$(BIN)/python -m pytest -n 0 -q src

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

goldens: $(READY) ## rewrite tests/goldens from what the views print now
	$(BIN)/python -m pytest -n 0 -q --update-goldens tests

pictures: $(READY) ## draw docs/pictures again; needs graphviz
	$(BIN)/python docs/pictures.py

# The alternatives that can be installed are measured in the same process.
$(VENV)/.bench: $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[bench]'
	@touch $@

bench: $(VENV)/.bench ## what everything costs: recording, memory, statistics and captures, graphs, saving
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/tensors.py
	$(BIN)/python bench/graphs.py
	$(BIN)/python bench/scale.py

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
