# make serve model=demo policy=snapkv   every name=value goes to `kvtide serve`
# make test ARGS="tests/test_weights.py -k digits"
# make bench BENCH=policies ARGS=--quick
SHELL := /bin/bash
.DEFAULT_GOAL := test
.PHONY: serve test lint format bench setup clean

BIN := .venv/bin
BENCH := serving
NOT_OURS := ARGS PYTHON MAKE% -*%
SETTINGS = $(strip $(foreach v,$(filter-out $(NOT_OURS),$(.VARIABLES)),$(if $(findstring command line,$(origin $v)),$v='$($v)')))

setup:
	@./scripts/setup.sh

serve: setup
	$(BIN)/kvtide serve $(SETTINGS) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.bench_$(BENCH) $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
