# make demo   read, resample and analyse a synthetic OCT mosaic
# make test   run the tests (those for the GPU too, where there is one)
# make test-slow   the same with the long matrices
# make lint   check style, types, import directions and shell scripts
#
# Each makes .venv with this machine's python3 if it is not there, and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PYTHON="$(PYTHON)" VENV="$(VENV)" shell_scripts/install.sh

.PHONY: demo test test-slow lint clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.has-base
	$(BIN)/linum-demo --out demo-out --overwrite

# On a machine with a GPU its tests run several at a time, so that the device is busy with something else: an order that
# no event gives shows only then. Those that measure the device itself run alone, after them.
test: $(VENV)/.has-test
	@if shell_scripts/gpu_extra.sh >/dev/null; then \
		$(BIN)/python -m pytest -n auto -m "not gpu" && \
		$(BIN)/python -m pytest -n 4 -m "gpu and not gpu_alone" --require-gpu && \
		$(BIN)/python -m pytest -m gpu_alone --require-gpu; \
	else \
		$(BIN)/python -m pytest -n auto --dist worksteal; \
	fi

test-slow: $(VENV)/.has-test
	$(BIN)/python -m pytest -n auto --dist worksteal --slow -m "not gpu"
	@if shell_scripts/gpu_extra.sh >/dev/null; then $(BIN)/python -m pytest --slow -m gpu --require-gpu; fi

lint: $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck -x -P SCRIPTDIR $$(git ls-files '*.sh' .ci/run)

$(VENV)/.has-base: pyproject.toml
	$(INSTALL) base

$(VENV)/.has-test: pyproject.toml
	$(INSTALL) test

$(VENV)/.has-lint: pyproject.toml
	$(INSTALL) lint

clean:
	rm -rf $(VENV) demo-out build dist *.egg-info
