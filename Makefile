# Every target works in a fresh clone: the first one makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m-32k

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv demo test lint clean

venv: $(INSTALLED)

# torch comes first, so that the pinned build is what everything else is resolved against.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/oasiskv generate --model $(MODEL) \
		--prompt-file src/oasiskv/data/demo/document.txt \
		--budget 512 --hot 1024 --sink 16 --window 64 \
		--lookahead held_back --draft ngram --max-new-tokens 12

test: venv
	$(BIN)/oasiskv models fetch $(MODEL)
	$(BIN)/pytest

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Fetched models stay: they are in the user's cache, not here.
clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
