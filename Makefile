# make demo   read, resample and analyse a synthetic OCT mosaic
# make test   run the tests (those for the GPU too, where there is one)
# make test-slow   the same with the long matrices
# make gpu-test    run the tests that need a GPU, and fail where there is none
# make sanitize    run some of them under compute-sanitizer (memcheck, racecheck): slow
# make bench  time reading, resampling and the work on tissue beside their peers, into bench-out/
# make lint   check style, spelling, types, import directions, CUDA and shell scripts
# make format     apply the styles that lint checks
# make docs       build the documentation site, without a warning, into build/site
#
# Each makes .venv with this machine's python3 if it is not there, and installs what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Variables that were given to make: older versions of it do not export them to $(shell …).
GIVEN := $(foreach name,LINUMPY_NATIVE CXX,$(if $(filter command%,$(origin $(name))),$(name)="$($(name))"))
INSTALL := $(GIVEN) PYTHON="$(PYTHON)" VENV="$(VENV)" shell_scripts/install.sh

# What an installation is made of. It is made again after a change of these, or once a compiler has appeared for a missing
# native core.
BUILT := pyproject.toml CMakeLists.txt $(wildcard linumpy/core/src/*)
ifneq ($(wildcard $(VENV)/.no-core),)
BUILT += $(shell $(INSTALL) cured)
endif

# Scripts that tests start need not compile linumpy's modules again each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: again demo test test-slow gpu-test sanitize bench lint format docs clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.has-base
	$(BIN)/linum-demo --out demo-out --overwrite

# On a machine with a GPU its tests run several at a time, so that the device is busy with something else: an order that
# no event gives shows only then. Those that measure the device itself run alone, after them. Worksteal leaves the tests of
# a file to one process where it can: each process compiles the kernels and makes the data of the files that it runs.
test: $(VENV)/.has-test
	@if shell_scripts/gpu_extra.sh >/dev/null; then \
		$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu" && \
		$(BIN)/python -m pytest -n 4 --dist worksteal -m "gpu and not gpu_alone" --require-gpu && \
		$(BIN)/python -m pytest -m gpu_alone --require-gpu; \
	else \
		$(BIN)/python -m pytest -n auto --dist worksteal; \
	fi

test-slow: $(VENV)/.has-test
	$(BIN)/python -m pytest -n auto --dist worksteal --slow -m "not gpu"
	@if shell_scripts/gpu_extra.sh >/dev/null; then $(BIN)/python -m pytest --slow -m gpu --require-gpu; fi

gpu-test: $(VENV)/.has-test
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "gpu and not gpu_alone" --require-gpu
	$(BIN)/python -m pytest -m gpu_alone --require-gpu

# Both tools slow kernels down a hundredfold, so small tests stand for each kernel: those marked `sanitize`, and for the
# decoders, of which SANITIZE_ALL names the files, all.
SANITIZE ?= tests
SANITIZE_ALL ?= tests/gpu/codecs/test_encoded_on_gpu.py
sanitize: $(VENV)/.has-test
	for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 9 --target-processes all \
			$(BIN)/python -m pytest -q -p no:cacheprovider -m sanitize --require-gpu $(SANITIZE) || exit; \
		test -z "$(SANITIZE_ALL)" || compute-sanitizer --tool $$tool --error-exitcode 9 --target-processes all \
			$(BIN)/python -m pytest -q -m "gpu and not gpu_alone" --require-gpu $(SANITIZE_ALL) || exit; \
	done

bench: $(VENV)/.has-test
	mkdir -p bench-out
	$(BIN)/linum-benchmark-kvikio-zarr --suite raw --json bench-out/raw.json --plot bench-out/raw.png
	$(BIN)/linum-benchmark-kvikio-zarr --suite codecs --json bench-out/codecs.json --plot bench-out/codecs.png
	$(BIN)/python -m benchmarks resampling --json bench-out/resampling.json --plot bench-out/resampling.png
	$(BIN)/python -m benchmarks tissue --json bench-out/tissue.json --plot bench-out/tissue.png

# Sources that clang-format formats.
CPP = $$(git ls-files '*.cu' '*.cuh' 'linumpy/core/src/*.cpp' 'linumpy/core/src/*.h*' 'tests/core/*.cpp' 'tests/core/*.hpp')

lint: $(VENV)/.has-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/typed.py
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/shellcheck -x -P SCRIPTDIR $$(git ls-files '*.sh' .ci/run)
	$(BIN)/codespell

format: $(VENV)/.has-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The variable silences an advertisement of the theme.
docs: $(VENV)/.has-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.has-base: $(BUILT)
	$(INSTALL) base

$(VENV)/.has-test: $(BUILT)
	$(INSTALL) test

$(VENV)/.has-lint: $(BUILT)
	$(INSTALL) lint

$(VENV)/.has-docs: $(BUILT)
	$(INSTALL) docs

clean:
	$(INSTALL) clean
	rm -rf demo-out bench-out build dist *.egg-info
