// SPDX-License-Identifier: Apache-2.0
#include "checker/bind_checker.hpp"

namespace hal::checker {

void bind_checker(pybind11::module_& m) {
    auto sub = m.def_submodule("checker", "Explores the deliveries that an ordering profile allows (docs/checker.md).");
    bind_litmus(sub);
    bind_search(sub);
}

}  // namespace hal::checker
