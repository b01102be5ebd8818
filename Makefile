# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set everything up in .venv and run; nothing else needs to be installed but Python >= 3.11
# (with venv and headers) and a C++20 compiler. `make help` lists the rest.
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
# torch's CPU build is a fraction of its default one. Where its index does not answer, what pip finds by itself serves: a
# mirror, PIP_FIND_LINKS, the default build. TORCH_INDEX= asks for that at once.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Exit status 0 if the web address in $1 answers within seconds. pip itself would ask a silent index for each package anew.
ANSWERS = $(BIN)/python -c 'import os, ssl, sys; from urllib.request import urlopen; \
            tls = ssl.create_default_context(cafile=os.environ.get("PIP_CERT")); \
            urlopen(sys.argv[1], timeout=5, context=tls)' $1 2>/dev/null

# What is compiled here: the native module, the emulated devices and all that they are compiled from.
CXX_SOURCES := $(shell find kernels_host kernels_cuda kernels_ascend hal/include -name '*.cpp' -o -name '*.hpp' -o -name '*.h' \
                 -o -name '*.cu' -o -name '*.cuh' -o -name CMakeLists.txt)
# Sources that clang-format keeps; vendor folders join as they come.
FORMATTED   := $(shell find kernels_* hal/include -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

SETUP := $(VENV)/.built $(VENV)/.tools $(VENV)/.frameworks

.PHONY: help demo test check lint format bench clean
help:
	@echo 'make demo    set up, then run a mixture-of-experts layer stack over four local ranks'
	@echo 'make test    set up, then lint and all tests'
	@echo 'make check   tests only          make lint    ruff, mypy --strict, clang-format'
	@echo 'make format  rewrite C++ sources make bench   dispatch and combine over a sweep'
	@echo 'make clean   remove what was built'

demo: $(VENV)/.built
	$(BIN)/hal demo $(DEMO)

# What is compiled and what is downloaded take turns on neither. Lint first: it is quick, and pytest's closing line stays
# last.
test:
	@$(MAKE) --no-print-directory -j2 $(SETUP)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory check

check: $(SETUP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

lint: $(SETUP)
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
# CMake and Ninja come from PyPI where the system has none. What HAL needs at run time is installed here too: then the
# compilation below installs nothing that the steps beside it might install at the same time. Ninja is kept from make's own
# job server, which recipes that are not makes have no access to.
$(VENV)/.compilers: tests/requirements-build.txt pyproject.toml $(VENV)/.made
	$(PIP) -r tests/requirements-build.txt
	@command -v cmake >/dev/null || $(PIP) cmake
	@command -v ninja >/dev/null || $(PIP) ninja
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
	  >$(VENV)/needs.txt
	$(PIP) --no-build-isolation -r $(VENV)/needs.txt
	touch $@

$(VENV)/.built: pyproject.toml CMakeLists.txt $(CXX_SOURCES) $(VENV)/.compilers
	MAKEFLAGS= PATH="$(abspath $(BIN)):$$PATH" CXX="$(CXX)" $(PIP) --no-build-isolation --no-deps --editable .
	touch $@

# These wait for one another, since pip may not change one environment twice at a time.
$(VENV)/.tools: tests/requirements.txt $(VENV)/.compilers
	$(PIP) -r tests/requirements.txt
	touch $@

# Array frameworks that tests hand to HAL. A machine for which one is not built still runs every other test; the tests
# that need it say so when they skip.
$(VENV)/.frameworks: tests/requirements-torch.txt tests/requirements-jax.txt $(VENV)/.tools
	@if [ -n "$(TORCH_INDEX)" ] && $(call ANSWERS,$(TORCH_INDEX)/torch/); then from="--index-url $(TORCH_INDEX)"; fi; \
	  set -x; $(PIP) $$from -r tests/requirements-torch.txt || echo "torch could not be installed: its tests will skip" >&2
	$(PIP) -r tests/requirements-jax.txt || echo "jax could not be installed: its tests will skip" >&2
	touch $@
