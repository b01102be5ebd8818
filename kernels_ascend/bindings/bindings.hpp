// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <pybind11/pybind11.h>

void bind_emulation(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
