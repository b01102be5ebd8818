// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <pybind11/pybind11.h>

#include "checker/litmus_program.hpp"
#include "checker/profile.hpp"

namespace hal::checker {

Profile profile_from(const pybind11::dict& d);
LitmusSource source_from(const pybind11::dict& d);

void bind_litmus(pybind11::module_& m);
void bind_search(pybind11::module_& m);

// Adds the submodule `checker`.
void bind_checker(pybind11::module_& m);

}  // namespace hal::checker
