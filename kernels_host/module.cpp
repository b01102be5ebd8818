// SPDX-License-Identifier: Apache-2.0
// The extension module hal_host._engine. Each part of kernels_host/ adds its own bindings through one bind_* function.
#include <pybind11/pybind11.h>

#include "checker/bind_checker.hpp"
#include "ep/bind_ep.hpp"
#include "transport/bind_transport.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_engine, m) {
    m.doc() = "HAL's host engine: shared-memory transport, dispatch and combine kernels, ordering explorer.";
    hal::bind_transport(m);
    hal::bind_ep(m);
    hal::checker::bind_checker(m);
}
