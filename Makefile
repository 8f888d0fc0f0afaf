# Two commands are enough on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each process takes up to 3 GB.
PROCESSES := -n logical --maxprocesses 4

.PHONY: demo test test-newest test-all coverage check lint types docs bench release clean

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(BIN)/fnet train digits --out runs/demo
	$(BIN)/fnet eval runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest $(PROCESSES)

# What reads or compiles traced programs, on the newest Python that pyproject.toml lists and the
# newest JAX, if they are here and there is time.
test-newest: $(VENV)/.installed-dev
	$(BIN)/python -m tests.newest --seconds $(or $(TEST_SECONDS),480)

test-all: $(VENV)/.installed-dev
	$(BIN)/pytest $(PROCESSES) -m "slow or not slow"

# Lines of fnet and train that tests run, also as pages in dist/coverage/html.
coverage: $(VENV)/.installed-dev
	$(BIN)/pytest $(PROCESSES) -m "slow or not slow" --cov --cov-report=term --cov-report=html --cov-fail-under=95

check: lint types test-all

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The documentation, as pages in dist/site; what would be a warning is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build

# Every benchmark, as one log: runs/bench/benchmarks.md; hours. `make bench BENCH=--quick` measures each
# number of the first page again. Peers
# that are not installed are left out: .venv/bin/pip install --editable '.[peers,target-gpu,target-tpu]'.
# With these and no GPU, JAX's plugin may crash where it looks for one: JAX_PLATFORMS=cpu make bench.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks $(BENCH)

# Wheel and source distribution, tried in empty environments: lowest and newest versions of the
# dependencies, each Python of pyproject.toml that is on the path or in pyenv.
release: $(VENV)/.installed-dev
	$(BIN)/python -m tests.release

clean:
	rm -rf $(VENV) .venv-newest runs/demo dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fnet needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@
