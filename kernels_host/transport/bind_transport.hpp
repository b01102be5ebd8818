// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <pybind11/pybind11.h>

namespace hal {

// Transport (a base class for transports written in Python), ShmTransport, the two fabrics, and the translation of C++
// errors to hal.errors.
void bind_transport(pybind11::module_& m);

}  // namespace hal
