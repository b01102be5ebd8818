# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set everything up in .venv and run; nothing else needs to be installed but Python >= 3.11
# (with venv) and a C++20 compiler. `make help` lists the rest.
#
#   make demo DEMO="workload.tokens=256 topology.nodes=2"     overrides for `hal demo`
#   make test TESTS="tests/test_config.py -k hydra"           arguments for pytest
#   make PYTHON=python3.13 VENV=.venv313 test                 another interpreter

VENV   ?= .venv
# The first of these that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
            $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ifeq ($(origin CXX),default)
CXX    := c++
endif
# Test files run side by side, one process for each core; WORKERS=0 runs them in one.
WORKERS ?= auto
BIN    := $(VENV)/bin
# torch's CPU build is a fraction of its default one; where that index cannot be reached the default index serves.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

CXX_SOURCES := $(shell find kernels_host hal/include -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt)
# Sources that clang-format keeps; vendor folders join as they come.
FORMATTED   := $(shell find kernels_* hal/include -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help demo test check lint format bench clean
help:
	@echo 'make demo    set up, then run a mixture-of-experts layer stack over four local ranks'
	@echo 'make test    set up, then lint and all tests'
	@echo 'make check   tests only          make lint    ruff, mypy --strict, clang-format'
	@echo 'make format  rewrite C++ sources make bench   dispatch and combine over a sweep'
	@echo 'make clean   remove what was built'

demo: $(VENV)/.built
	$(BIN)/hal demo $(DEMO)

# Lint first: it is quick, and pytest's closing line stays last.
test: lint check

check: $(VENV)/.built $(VENV)/.tools $(VENV)/.frameworks
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

lint: $(VENV)/.built $(VENV)/.tools $(VENV)/.frameworks
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: $(VENV)/.tools
	$(BIN)/clang-format -i $(FORMATTED)

bench: $(VENV)/.built
	$(BIN)/hal bench dispatch -m workload=small,skewed
	$(BIN)/hal bench combine -m workload=small,skewed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# --- setting up: one stamp for each step, so that a second call starts at once -----------------------------------------

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; install it (Debian, Ubuntu: apt install python3 python3-venv) or say make PYTHON=/path/to/python" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { echo "no C++ compiler '$(CXX)'; install one (Debian, Ubuntu: apt install g++) or say make CXX=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python -m venv failed; Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	touch $@

# Build tools live in .venv, not in pip's throw-away build environment, so that a rebuild compiles only what changed.
# CMake and Ninja come from PyPI where the system has none.
$(VENV)/.compilers: tests/requirements-build.txt $(VENV)/.made
	$(PIP) -r tests/requirements-build.txt
	@command -v cmake >/dev/null || $(PIP) cmake
	@command -v ninja >/dev/null || $(PIP) ninja
	touch $@

$(VENV)/.built: pyproject.toml CMakeLists.txt $(CXX_SOURCES) $(VENV)/.compilers
	PATH="$(abspath $(BIN)):$$PATH" CXX="$(CXX)" $(PIP) --no-build-isolation --editable .
	touch $@

$(VENV)/.tools: tests/requirements.txt $(VENV)/.made
	$(PIP) -r tests/requirements.txt
	touch $@

# Array frameworks that tests hand to HAL. A machine for which one is not built still runs every other test; the tests
# that need it say so when they skip.
$(VENV)/.frameworks: tests/requirements-torch.txt tests/requirements-jax.txt $(VENV)/.made
	$(PIP) $(if $(TORCH_INDEX),--retries 1 --index-url $(TORCH_INDEX)) -r tests/requirements-torch.txt \
	  || echo "torch could not be installed: its tests will skip" >&2
	$(PIP) -r tests/requirements-jax.txt || echo "jax could not be installed: its tests will skip" >&2
	touch $@
