PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo examples fuzz test test-slow test-versions bench models scale lint types docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: .venv/.installed ## the virtual environment with fxshard (editable) and all tools

# constraints.txt pins torch exactly. Where an index or find-links offers 2.13.0+cpu, pip prefers it;
# plain PyPI brings the CUDA build.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e ".[dev,docs,hf]"
	touch $@

examples: .venv/.installed ## run every example, and check what it prints
	$(BIN)/python -m pytest -q tests/end_to_end/test_examples.py -m "slow or not slow"

demo: .venv/.installed ## train the demo model; writes runs/demo
	$(BIN)/python -m examples.demo --out runs/demo

test: .venv/.installed ## the fast tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

test-slow: .venv/.installed ## the tests marked slow
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

N ?= 1000
SEED ?= 1000
fuzz: .venv/.installed ## N=1000 random programs from SEED on beside eager; goes on where it stopped
	$(BIN)/python -m tests.fuzz --start $(SEED) --count $(N) --out runs/fuzz.jsonl

# Each in an environment of its own, .venv-2.11 and so on: constraints.txt without torch and without
# what a version of torch bounds otherwise. PyPI has the CUDA builds alone: 5 to 6 GB each.
VERSIONS ?= 2.11.0 2.15.0
version = $(filter $*.%,$(VERSIONS))

test-versions: $(addprefix test-torch-,$(basename $(VERSIONS))) ## the fast tests with other versions of torch

test-torch-%: .venv-%/.installed
	@$(<D)/bin/python -c "import sys, torch; print('torch', torch.__version__, 'in', sys.prefix)"
	$(<D)/bin/python -m pytest -q -n 2 --dist worksteal

.SECONDARY: $(addsuffix /.installed,$(addprefix .venv-,$(basename $(VERSIONS))))
.venv-%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -vE '^(torch|setuptools)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install -c $(@D)/constraints.txt torch==$(version) -e ".[test]"
	touch $@

bench: .venv/.installed ## measure everything; writes benchmarks/results and docs/benchmarks.md
	$(BIN)/python -m benchmarks

models: .venv/.installed ## try every architecture of tests/zoo; writes docs/models.md
	$(BIN)/python -m benchmarks.models_page

scale: .venv/.installed ## plan Llama 3 on up to 16,384 GPUs; writes docs/scale.md
	$(BIN)/python -m benchmarks.scale_page

lint: .venv/.installed ## style, format, import layers, private imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache # its cache keeps imports of a module that was absent as external
	$(BIN)/python .ci/private_imports.py fxshard passes

types: .venv/.installed ## mypy, strict
	$(BIN)/mypy

docs: .venv/.installed ## the documentation as a site, in site/; what is broken or lacks a docstring fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove caches and build outputs; keeps .venv* and runs/
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
