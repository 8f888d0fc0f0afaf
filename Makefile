# Two commands are enough on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all check lint types clean

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(BIN)/fnet train digits --out runs/demo
	$(BIN)/fnet eval runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2

test-all: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 -m "slow or not slow"

check: lint types test-all

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fnet needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed
