// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.hpp"

void bind_kernels(pybind11::module_&) {}
