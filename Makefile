# Every target sets up what it needs; a second call skips what is done.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := inkling_rl rollout trainer lora recipes
FRESH := constraints.txt pyproject.toml Makefile

.PHONY: setup oracles quickstart test test-all test-exhaustive lint format bench clean

setup: $(READY)

$(READY): $(FRESH) scripts/setup.sh
	@bash scripts/setup.sh $(VENV)
	@touch $@

# The libraries that the number formats are compared with; their tests are skipped without.
oracles: $(VENV)/oracles/.ready

$(VENV)/oracles/.ready: constraints.txt scripts/setup.sh | $(READY)
	@bash scripts/setup.sh $(VENV) oracles
	@touch $@

quickstart: $(READY)
	@$(BIN)/inkling-rl train quickstart.yaml $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not exhaustive and not gpu" $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -m "not gpu and not exhaustive" $(ARGS)

# What takes too long for every change: statistics of sampled tokens at full counts, every mode for every sampling.
test-exhaustive: $(READY)
	$(BIN)/python -m pytest -m exhaustive $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m tests.benchmarks.engine_speed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
