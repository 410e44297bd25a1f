# Each target works from nothing: it finds Python, makes .venv, installs jaxnn there, then does its work.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# PyTorch and Keras, which jaxnn is measured against: apart, for they need not share our Python or our packages.
PEERS := .venv-peers
PEERS_PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13,$(shell $(python) -c 'import ensurepip, venv' 2>/dev/null && echo $(python))) python3)
PEERS_PACKAGES := torch==2.13.0 keras==3.15.1 numpy

.DEFAULT_GOAL := help
.PHONY: help demo benchmark test lint check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-9s  %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED)  ## train a small network on handwritten digits
	@$(BIN)/python experiments/digits_mlp.py

benchmark: $(VENV)/.benchmark $(PEERS)/.installed  ## time training against PyTorch, Keras and plain JAX
	@$(BIN)/python experiments/benchmarks/peers.py --torch-python $(PEERS)/bin/python $(ARGS)

test: $(INSTALLED)  ## run the tests
	@$(BIN)/python -m pytest -n 2 tests

lint: $(INSTALLED)  ## check format, style and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy jaxnn experiments

check:  ## lint, then test
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test

clean:  ## remove .venv, .venv-peers, caches and builds; runs/ stays
	@rm -rf $(VENV) $(PEERS) build dist .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '$(NEW_ENOUGH); import pip' 2>/dev/null; then $(MAKE_VENV); fi
	@echo 'Installing jaxnn and its tools into $(VENV): once, a few minutes at most.'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' \
	  || { echo 'The installation failed for the reason above: it needs the network, or a mirror that pip is told of.' >&2; exit 1; }
	@touch $@

$(VENV)/.benchmark: $(INSTALLED)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[benchmark]'
	@touch $@

$(PEERS)/.installed: Makefile
	@echo 'Installing $(PEERS_PACKAGES) into $(PEERS): once, some minutes.'
	@test -x $(PEERS)/bin/python || $(PEERS_PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check $(PEERS_PIP) $(PEERS_PACKAGES)
	@touch $@

NEW_ENOUGH := import sys; assert sys.version_info >= (3, 12)

# A command is tried by running it: what pyenv and the like leave on the PATH need not run.
define MAKE_VENV
found=; \
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python); do \
  $$python -c '$(NEW_ENOUGH)' 2>/dev/null || continue; \
  found=$$python; \
  $$python -c 'import ensurepip, venv' 2>/dev/null && exec $$python -m venv --clear $(VENV); \
done; \
if test -n "$$found"; then \
  echo "$$found lacks its venv module: install it (Debian, Ubuntu: sudo apt install python3-venv), then run make again." >&2; \
elif test -n '$(PYTHON)'; then \
  echo '$(PYTHON) is not a Python of version 3.12 or newer: give another as make PYTHON=/path/to/python3.' >&2; \
else \
  echo 'jaxnn needs Python 3.12 or newer and none is on the PATH: install it from python.org or with the package manager, or give its path as make PYTHON=/path/to/python3.' >&2; \
fi; \
exit 1
endef
