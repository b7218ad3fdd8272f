# Two commands: `make demo` and `make test`. Both need only Python (3.10 or newer) and its venv module.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Two environments in one folder: what the package needs, and what developing it needs.
STAMP := $(VENV)/.installed
DEVELOP := $(VENV)/.installed-develop
# Python compiles a module when it is first imported: compiling all would take 0.4 GB more.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock --editable

# One thread a process: at these model sizes more threads only spin and stall.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
# Odd commands, damaged runs and odd calls; what each case does depends on these two alone.
CASES ?= 2000
SEED ?= 0

.PHONY: help env demo test peers wheel gpu fuzz check lint format types docs site clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

env: $(DEVELOP)  ## make the whole environment at .venv: tests, docs, notebooks, browser

# PyTorch's wheel brings 0.13 GB of its own test programs in C++.
PROGRAMS := $(addprefix $(VENV)/lib/python3*/site-packages/torch/,test bin/test_* bin/*StoreTest)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "loopinterp needs Python 3.10 or newer; choose one with: make env PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	@rm -rf $(PROGRAMS)
	@touch $@

$(DEVELOP): $(STAMP)
	$(INSTALL) '.[dev,docs,browser,kokoro]'
	@touch $@

demo: $(STAMP)  ## train, analyse and report on one model (a few minutes)
	$(BIN)/loopinterp demo --out runs/demo

test: env  ## run every test but those that need a GPU or other tools
	$(BIN)/python -m pytest -m "not gpu and not peers" -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Each group of other tools has an environment on top of ours, for what it needs in other versions.
PEERS := $(patsubst tests/peers/%.txt,build/peers/%/.installed,$(wildcard tests/peers/*.txt))
export OURO HUGINN RETROFITTED

peers: env $(PEERS)  ## install other tools beside ours, and compare with them
	$(BIN)/python -m pytest -m peers tests/peers

build/peers/%/.installed: tests/peers/%.txt $(DEVELOP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; ours = sysconfig.get_path("purelib"); \
	  print(f"import site; site.addsitedir({ours!r})")' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@

wheel: $(STAMP)  ## build the wheel, install it in an environment of its own, and use it there
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --constraint requirements.lock build/wheel/*.whl
	cd build/wheel && env/bin/python $(CURDIR)/tests/outside.py

gpu: env  ## whatever needs a GPU, in slices that can be stopped and gone on with
	$(BIN)/python -m analyses.gpu

fuzz: env  ## odd commands, damaged runs, odd calls (about four minutes)
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.fuzz.mixed_runs --seed $(SEED)

check: lint types docs  ## what CI runs before the tests

lint: env  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: env  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: env  ## pyright
	$(BIN)/pyright

docs: env  ## build the documentation; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

site: env  ## build the documentation with live pages beside it, to be hosted as it is
	@test -f runs/demo/comparison.html || $(MAKE) demo
	$(BIN)/python -m analyses.build_site --demo runs/demo --out build/site

clean:  ## remove the environment and what was built
	rm -rf $(VENV) docs/_build docs/reference/generated build dist .pytest_cache .ruff_cache .hypothesis
