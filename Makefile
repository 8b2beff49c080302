# Each target sets up what it needs in .venv and can be run again at any time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-deep bench check format clean

## demo: train a real network in fp32, bf16 and fp16 side by side, and write a report
demo: $(VENV)/.run
	$(BIN)/floatplan compare --task digits

## test: run the tests
test: $(VENV)/.dev
	$(BIN)/python -m pytest

## test-deep: what `make test` does a little of: random programs and sequences of calls, others each time
test-deep: $(VENV)/.dev
	$(BIN)/python -m pytest tests/programs --programs 2000
	$(BIN)/python -m pytest tests/step --sequences 5000

## bench: time training steps beside torch.amp, and what follows the backward. BENCH= for full size (an hour)
BENCH ?= --small
bench: $(VENV)/.run
	mkdir -p build
	$(BIN)/python benchmarks/step.py $(BENCH) --out build/step.json --plot build/step.html
	$(BIN)/python benchmarks/after_backward.py --out build/after_backward.json

## check: lint, types, and the order of the rooms
check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

## format: rewrite the sources as `make check` wants them
format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable ".[dev]"
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
