// SPDX-License-Identifier: Apache-2.0
// The extension module hal_ascend._engine.
#include "bindings/bindings.hpp"
#include "emulation/fault.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_engine, m) {
    m.doc() = "Ascend C kernels on an emulated UDMA engine.";
    static py::exception<hal::udma::Fault> fault(m, "Fault", PyExc_RuntimeError);
    static py::exception<hal::udma::Hang> hang(m, "Hang", PyExc_RuntimeError);
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const hal::udma::Fault& e) {
            py::object instance = py::reinterpret_borrow<py::object>(fault)(e.what());
            instance.attr("rule") = e.rule;
            PyErr_SetObject(fault.ptr(), instance.ptr());
        } catch (const hal::udma::Hang& e) {
            PyErr_SetString(hang.ptr(), e.what());
        }
    });
    bind_emulation(m);
    bind_kernels(m);
}
