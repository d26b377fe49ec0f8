# `make` alone lists the targets. Everything runs in .venv, which `make setup` makes and the other targets make when missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
EVALUATE := $(VENV)/.ready-evaluate
COMMA := ,
ARGS ?=
NONE_CHOSEN := || [ $$? -eq 5 ]  # pytest's status where ARGS leave no test

.DEFAULT_GOAL := help
.PHONY: help setup pretrain data test lint check format test-long test-float8 test-evaluate clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(DEV) ## make .venv with the tested versions; again only after a change of pyproject.toml or constraints.txt

# pip would compile everything, on one core, for half a minute; Python compiles what is imported, once, if it may keep it.
unexport PYTHONDONTWRITEBYTECODE
define install
$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '$(1)'
@touch $@
endef

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "regrow needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,.)

$(DEV): $(READY)
	$(call install,.[dev])

$(EVALUATE): $(DEV)
	$(call install,.[dev$(COMMA)evaluate])

pretrain: $(READY) ## train the 5M debug model on this machine, real text, no network; ARGS='run.name=... train.steps=...'
	$(BIN)/python -m jobs.pretrain $(ARGS)

data: $(READY) ## prepare the corpus without training
	$(BIN)/python -m jobs.prepare_data $(ARGS)

test: $(DEV) ## what needs no GPU and is quick enough for every commit; ARGS='-k ...' to choose
	$(BIN)/python -m pytest tests/unit tests/golden tests/dist tests/gpu -n auto -m 'not matrix and not long' $(ARGS) $(NONE_CHOSEN)
	$(BIN)/python -m pytest tests/cluster -m 'not matrix and not long' $(ARGS) $(NONE_CHOSEN)

lint: $(DEV) ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint ## the same, and the quick unit tests: two minutes
	$(BIN)/python -m pytest tests/unit tests/golden -m 'not slow and not long and not matrix' -q -n auto

format: $(DEV) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-long: $(DEV) ## the rest: every elastic case and drill on real raylets, 200 random kills of the checkpoint tiers (hours)
	CRASH_KILLS=200 $(BIN)/python -m pytest tests/dist/test_crashes.py $(ARGS) $(NONE_CHOSEN)
	$(BIN)/python -m pytest tests/unit tests/dist tests/cluster -m long $(ARGS) $(NONE_CHOSEN)

test-float8: $(DEV) ## the full float8 x compile x world size matrix (long)
	$(BIN)/python -m pytest tests/dist -m matrix $(ARGS)

test-evaluate: $(EVALUATE) ## jobs.evaluate and exports, with lm_eval and transformers (some 330 MB more in .venv)
	$(BIN)/python -m pytest tests/unit/test_evaluate.py tests/unit/test_huggingface.py $(ARGS)

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
