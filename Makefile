# Every target works in a fresh clone: it finds Python, creates .venv, installs jaxnn there, then runs.

PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# JAX's compiler for NVIDIA GPUs, in an environment of its own: with it installed, JAX looks for a GPU.
GPU := .venv-gpu
EXTRAS := dev
# PyTorch, Keras and tools that search, which jaxnn is benchmarked against, in an environment with its own Python.
PEERS := .venv-peers
PEERS_PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3.13,$(shell $(python) -c 'import ensurepip, venv' 2>/dev/null && echo $(python))) python3)
PEERS_PACKAGES := torch==2.13.0 keras==3.15.1 numpy optuna==5.0.0 lightgbm==4.7.0 ray[tune]==2.60.0

.DEFAULT_GOAL := help
.PHONY: help demo benchmark gpu-day native native-sanitize wheels test test-slow test-portable test-gpu test-gpu-compile mutate style types lint check docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s  %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED)  ## train a small network on handwritten digits, in seconds
	@$(BIN)/python experiments/digits_mlp.py

benchmark: $(VENV)/.benchmark $(PEERS)/.installed  ## time training against PyTorch, Keras and plain JAX
	@$(BIN)/python experiments/benchmarks/peers.py --torch-python $(PEERS)/bin/python $(ARGS)

gpu-day: $(INSTALLED)  ## check and measure everything on this machine's GPU, in eight minutes
	@$(BIN)/python experiments/benchmarks/gpu_day.py $(ARGS)

native: $(INSTALLED)  ## build and install native kernels, faster on CPUs: needs a C++ compiler
	@$(BIN)/python native/install.py

native-sanitize: $(INSTALLED)  ## run every native kernel under the thread and address sanitizers: needs CMake
	@$(BIN)/python -m pip install -qq --disable-pip-version-check onednn-devel-cpu-gomp==2023.2.0 onednn-cpu-gomp==2023.2.0
	@for sanitizer in thread address,undefined; do \
	  build=build/native-$$sanitizer; echo "Building native/stress with the sanitizer $$sanitizer, then running it: minutes."; \
	  cmake -S native -B $$build -DCMAKE_BUILD_TYPE= -DSANITIZE=$$sanitizer -DPython_EXECUTABLE='$(abspath $(BIN))/python' > /dev/null \
	    && cmake --build $$build > /dev/null && $$build/stress || exit 1; \
	done

wheels: $(INSTALLED)  ## build wheels into dist/, and try them in an empty environment
	@$(BIN)/python native/wheels.py

test: $(INSTALLED)  ## run the fast tests, in minutes
	@$(BIN)/python -m pytest -n 2 tests

test-slow: $(INSTALLED)  ## run the other tests: with processes, full disks, notebooks, studies and Ray
	@$(BIN)/python -m pytest -n 2 --only-slow tests

test-portable: $(INSTALLED)  ## run the tests of what native kernels compute, without them
	@JAXNN_NATIVE=off $(BIN)/python -m pytest -n 2 --slow $(addprefix tests/,nn/test_attention.py nn/test_convolution.py nn/test_dense.py \
	  nn/test_dropout.py nn/test_normalization.py nn/test_recurrent.py nn/test_transformations.py optim/test_adam.py \
	  trees/test_boosting.py engine/test_conformance.py run/test_resume.py) -k "not checks_of_scikit_learn"

test-gpu: $(INSTALLED)  ## run the fast tests on this machine's GPU, without those of several devices or of a CPU
	@$(BIN)/python -m pytest --device gpu -n 8 tests

test-gpu-compile: $(GPU)/.installed  ## compile for NVIDIA GPUs, of which none is needed, and check the programs
	@JAX_PLATFORMS=cpu JAXNN_NATIVE=off $(GPU)/bin/python -m pytest -n 2 --dist load tests/gpu_compile

mutate: $(INSTALLED)  ## change the library in 60 places and count the changes that tests find, in hours
	@$(BIN)/python experiments/mutation/mutate.py --count 60 $(ARGS)

style: $(INSTALLED)  ## check formatting and style
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(INSTALLED)  ## check types
	@$(BIN)/mypy jaxnn experiments

lint: style types  ## check formatting, style and types

check:  ## run lint, then test
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test

docs: $(VENV)/.docs  ## build the documentation into site/, or serve it with search: ARGS=--serve
	@$(BIN)/python -m mkdocs $(if $(filter --serve,$(ARGS)),serve,build) --strict

clean:  ## remove environments, caches and builds; runs/ stays
	@rm -rf $(VENV) $(GPU) $(PEERS) build dist site .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(GPU)/.installed: EXTRAS := dev,gpu-compile
$(INSTALLED) $(GPU)/.installed: pyproject.toml constraints.txt
	@if ! $(@D)/bin/python -c '$(NEW_ENOUGH); import pip' 2>/dev/null; then $(MAKE_VENV); fi
	@echo 'Installing jaxnn and its tools into $(@D): once, takes a few minutes.'
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' \
	  || { echo 'Installation failed, see above: pip needs network access or a configured mirror.' >&2; exit 1; }
	@touch $@

$(VENV)/.benchmark $(VENV)/.docs: $(INSTALLED)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(@:$(VENV)/.%=%)]'
	@touch $@

$(PEERS)/.installed: Makefile
	@echo 'Installing $(PEERS_PACKAGES) into $(PEERS): once, takes some minutes.'
	@test -x $(PEERS)/bin/python || $(PEERS_PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check $(PEERS_PIP) $(foreach package,$(PEERS_PACKAGES),'$(package)')
	@touch $@

NEW_ENOUGH := import sys; assert sys.version_info >= (3, 12)

# Each candidate is tested by running it: pyenv leaves commands on the PATH that do not run.
define MAKE_VENV
found=; \
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python); do \
  $$python -c '$(NEW_ENOUGH)' 2>/dev/null || continue; \
  found=$$python; \
  $$python -c 'import ensurepip, venv' 2>/dev/null && exec $$python -m venv --clear $(@D); \
done; \
if test -n "$$found"; then \
  echo "$$found lacks the venv module: install it (Debian, Ubuntu: sudo apt install python3-venv), then run make again." >&2; \
elif test -n '$(PYTHON)'; then \
  echo '$(PYTHON) is not Python 3.12 or newer: choose another with make PYTHON=/path/to/python3.' >&2; \
else \
  echo 'jaxnn needs Python 3.12 or newer, and none is on the PATH: install it from python.org or with a package manager, or pass its path with make PYTHON=/path/to/python3.' >&2; \
fi; \
exit 1
endef
