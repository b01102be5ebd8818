# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set everything up in .venv and run; nothing else needs to be installed but Python >= 3.11
# (with venv) and a C++20 compiler.
