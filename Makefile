# Each target sets up what it needs in .venv. Needs: Python 3.10 to 3.12 with pip, bash.
# `make test ARGS="-k plan"` hands arguments on; `make PYTHON=python3.10 ...` picks the interpreter.

SHELL := /bin/bash
PY := .venv/bin/python
ARGS ?=
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench parity wheel clean

help:
	@echo "make demo     train on handwritten digits with both backends, compare, draw demo.png"
	@echo "make test     run all tests with both backends"
	@echo "make lint     ruff, mypy, import contracts"
	@echo "make format   let ruff format and fix what it can"
	@echo "make parity   run the parity suite on both backends, print its table, write parity-report/"
	@echo "make bench    measure clip_grad_norm_ beside torch.nn.utils"
	@echo "make wheel    build sdist and wheel, and run the parity suite from the wheel in an empty folder"
	@echo "make clean    remove the environment, caches and build outputs"

setup:
	@bash ci/setup.sh

demo: setup
	$(PY) examples/digits.py --platform both --world-size 4 $(ARGS)

test: setup
	@bash ci/test.sh $(ARGS)

lint: setup
	@bash ci/lint.sh

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

parity: setup
	$(PY) -m hyper_parallel.parity --platforms torch mindspore --report parity-report $(ARGS)

bench: setup
	$(PY) benchmarks/clip.py $(ARGS)

wheel: setup
	@bash ci/wheel.sh $(ARGS)

clean:
	rm -rf .venv .venv.lock build dist demo.png parity-report .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
