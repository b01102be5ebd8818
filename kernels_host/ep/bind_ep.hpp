// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <pybind11/pybind11.h>

namespace hal {

// The dispatch and combine kernels for each fabric, the shape of their buffer, and the arithmetic that tests look at.
void bind_ep(pybind11::module_& m);

}  // namespace hal
