# The commands of this project. `make test` and `make demo` set everything up on a fresh machine.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Tests share nothing, so two workers halve the wait; set JOBS=0 for one process with a debugger.
JOBS   ?= 2

.DEFAULT_GOAL := help
VIEWER := src/sightline/page/viewer.js
.PHONY: help demo test test-all engine viewer wheels matrix lint format types imports schema unit slow plain examples sanitize fuzz goldens pictures docs bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Constraints hold for the build environment too, hence the variable and not only the option.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[torch,dev]'
	@touch $@

demo: engine $(VIEWER) ## trace a small transformer, forward and backward, and print the views
	$(BIN)/sightline demo

test: lint types imports unit plain examples ## lint, types, import directions, tests

test-all: test slow ## the same, and the tests that take longest

# Without a compiler the Python engine records, so that this never fails.
engine: $(READY) ## build the native engine, where a C++ compiler is
	@$(BIN)/sightline engine --build || true

# Without Node there is no page; everything else works, so that this never fails.
$(VIEWER):
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory viewer; \
	else echo "The viewer of the page is not built: that needs Node 20, which is not here."; fi

# `npm install` takes the versions of the lock file too; `npm ci` would insist on the binaries of every platform in it.
viewer: ## build the viewer of the page, with its types checked and its tests run; needs Node 20
	cd viewer && npm install --no-save --no-audit --no-fund --loglevel=error && npm run --silent test && npm run --silent build

# A wheel of torch is a gigabyte, and one is downloaded for each minor version; WHEELS="--torch 2.13" takes some.
wheels: $(READY) $(VIEWER) ## wheels with native engines for each CPython here, a pure one and the sources, in dist/
	$(BIN)/python packaging/wheels.py $(WHEELS)

# Gigabytes again: an environment for each pair, kept in build/matrix. MATRIX="3.13:2.15" takes some.
matrix: $(READY) ## the recorder's tests with other versions of CPython and torch
	$(BIN)/python packaging/matrix.py $(MATRIX)

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy --strict
	$(BIN)/mypy

imports: $(READY) ## who may import whom
	$(BIN)/python checks/imports.py

schema: $(READY) ## write what is derived from the schema: the C++ row layout, rows, tables of the documents
	$(BIN)/python checks/schema.py

unit: engine $(VIEWER) ## the tests alone; ARGS="-k fold -x" for some of them
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" tests $(ARGS)

slow: engine $(VIEWER) ## the tests that take longest: each operator of torch, real jobs of several processes
	$(BIN)/python -m pytest -n $(JOBS) -m slow tests $(ARGS)

# What any engine must do, on the one that needs no compiler.
PLAIN := $(addprefix tests/recording/,test_compiled.py test_errors.py test_exceptions.py test_holds_up.py \
	test_inplace.py test_interleaving.py test_overlap.py test_records.py streaming)
plain: $(READY) ## the recorder's tests on the plain engine
	SIGHTLINE_ENGINE=python $(BIN)/python -m pytest -n $(JOBS) -q $(PLAIN) $(ARGS)

# In one process: a worker's own frames would stand above the examples' in what the views print.
examples: engine $(VIEWER) ## the examples in the docstrings
	$(BIN)/python -m pytest -n 0 -q src

# The extension is built with sanitizers into a folder of its own, by the first test that loads it. Python itself
# is not, so it gets the library from outside, and frees little of what it allocates: leaks are not looked for.
# pytest leaves standard error open, because that is where the report of a fault goes before the process ends; its
# own handler of faults may not take the sanitizer's place.
sanitize: $(READY) ## the tests of the native engine, with the address and undefined-behaviour sanitizers
	SIGHTLINE_SANITIZE=1 CXX="$(CXX)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=2 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -n 0 -q --capture=sys tests/recording/native $(ARGS)

# The long run: FUZZ="--bundles 10000 --journals 10000 --interrupts 1000 --places 1 --kills 200 --endings 500 --cuts 120", hours.
FUZZ ?= --bundles 1000 --journals 1000 --interrupts 100 --places 20 --kills 20 --endings 10 --cuts 6 --jobs 100
# Random training programs: each sentence of the views is compared with what the program is known to do.
TRUTH ?= --count 2000 --jobs 20
fuzz: engine ## damaged files, interrupts and kills; programs and jobs and all that is said of them; prints seeds
	$(BIN)/python -m tests.fuzz $(FUZZ)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.truth $(TRUTH)

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

goldens: $(READY) ## rewrite tests/goldens from what the views print now
	$(BIN)/python -m pytest -n 0 -q --update-goldens tests

pictures: $(READY) ## draw docs/pictures again; needs graphviz
	$(BIN)/python docs/pictures.py

docs: $(READY) ## build the documentation site into build/site; a link that leads nowhere fails
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "The site is build/site/index.html."

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
	rm -rf $(VENV) viewer/node_modules src/sightline/page/viewer.* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
