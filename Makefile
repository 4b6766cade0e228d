# Every target sets up what it needs in .venv and is quick the second time. Only standard tools: make, a Python, pip.
# PYTHON=python3.12 chooses the interpreter, VARIANT=cpu|cuda the build of fbgemm, TESTS=tests/unit what `test` runs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-slow coverage check bench docs examples clean

PYTHON ?=
VARIANT ?= auto
TESTS ?= tests cloudsim/tests
# Half as many again as there are cores: tests wait for processes and sockets.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell echo $$(( ($(CORES) * 3 + 1) / 2 )))

PY := .venv/bin/python
PYTEST := $(PY) -m pytest --dist worksteal --maxprocesses 8
PIP := $(PY) -m pip --quiet --quiet --disable-pip-version-check --no-input
# Python compiles what it imports; pip would compile all of every package.
export PIP_COMPILE := 0

# The TPU's compiler, as this JAX wants it. Beside the packages: among them, JAX would look for TPUs at every start.
LIBTPU := from importlib.metadata import requires; print(next(r.partition(";")[0] for r in requires("jax") if r.startswith("libtpu")))

help:  ## list the targets
	@echo "make TARGET, where TARGET is one of:"
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/  \1\t\2/p' Makefile | expand -t 14

quickstart: .venv/.embark  ## install what training needs, then train a small model here
	@.venv/bin/embark train quickstart --fresh

test: .venv/.dev  ## run the tests that need nothing but Python: every promise at least once
	@$(PYTEST) -n $(WORKERS) -m "not slow" $(TESTS)

test-slow: .venv/.dev  ## run the others: containers, emulators, browsers, long fault drills, the TPU's compiler
	@$(PYTEST) -n $(WORKERS) -m slow $(TESTS)

coverage: .venv/.dev  ## run all tests and report which lines none of them ran
	@$(PYTEST) -n $(CORES) --cov --cov-report= $(TESTS)
	@$(PY) -m coverage report --fail-under=90

check: .venv/.dev  ## ruff, mypy --strict and the import contracts
	@code=0; \
	$(PY) -m ruff check || code=1; \
	$(PY) -m mypy --num-workers 2 || code=1; \
	.venv/bin/lint-imports || code=1; \
	exit $$code

bench: .venv/.dev  ## measure this machine's CPU against stock TorchRec
	@$(PY) bench/cpu_speed.py

docs: .venv/.embark  ## write the pages that are made from the code
	@$(PY) tools/make_spec.py > docs/reference/spec.md
	@$(PY) tools/make_commands.py > docs/reference/commands.md
	@$(PY) tools/make_prices.py > docs/reference/prices.md
	@$(PY) tools/make_lint.py > docs/reference/lint.md
	@$(PY) tools/make_diagnose.py > docs/reference/diagnose.md
	@$(PY) tools/make_metrics.py > docs/reference/metrics.md
	@$(PY) tools/make_contract.py

examples: .venv/.embark  ## write examples/cloud_deployment, which is rendered
	@rm -rf examples/cloud_deployment
	@XDG_DATA_HOME=/nonexistent $(PY) examples/make_examples.py

clean:  ## remove .venv, caches and coverage files; runs/ stays
	@rm -rf .venv dist build htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src cloudsim tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a file inside .venv is newer than everything that decided what was installed.

.venv/.made:
	@why=""; \
	for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if reason=$$("$$python" src/embark/stack/versions.py usable 2>/dev/null); then \
	    echo "Making .venv with $$("$$python" --version)"; \
	    "$$python" -m venv --upgrade-deps .venv || { echo "$$python -m venv failed: apt-get install -y python3-venv" >&2; exit 1; }; \
	    touch $@; exit 0; \
	  fi; \
	  why+="  $$python: $${reason:-not found, or older than Python 3.11}"$$'\n'; \
	done; \
	printf 'No Python 3.11 or newer that can make .venv:\n%sInstall one (apt-get install -y python3 python3-venv) or say which: make PYTHON=/path/to/python3.12\n' "$$why" >&2; \
	exit 1

.venv/.stack: .venv/.made src/embark/stack/versions.toml src/embark/stack/versions.py
	@$(PY) src/embark/stack/versions.py install --python $(PY) --variant $(VARIANT)
	@touch $@

.venv/.embark: .venv/.stack pyproject.toml
	@echo "Installing Embark"
	@$(PIP) install -e '.[columns,tensorboard]'
	@touch $@

.venv/.dev: .venv/.stack pyproject.toml cloudsim/pyproject.toml
	@echo "Installing Embark and what its tests need"
	@$(PIP) install -e '.[dev]' -e ./cloudsim
	@[ "$$(uname -m)" != x86_64 ] || $(PIP) install --no-deps --upgrade --target .venv/libtpu "$$($(PY) -c '$(LIBTPU)')"
	@touch .venv/.embark $@
