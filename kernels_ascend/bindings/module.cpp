// SPDX-License-Identifier: Apache-2.0
// The extension module hal_ascend._engine.
#include "bindings/bindings.hpp"
#include "emulation/fault.hpp"
#include "launch/runtime.hpp"
#include "transport/transport.hpp"

namespace py = pybind11;

namespace {

void raise(const char* name, const py::tuple& args, const py::dict& kwargs = {}) {
    const py::object type = py::module_::import("hal.errors").attr(name);
    PyErr_SetObject(type.ptr(), type(*args, **kwargs).ptr());
}

// Errors of kernels and transport as those of hal/errors.py.
void translate(std::exception_ptr error) {
    using namespace py::literals;
    try {
        if (error) std::rethrow_exception(error);
    } catch (const hal::PeerTimeoutError& e) {
        raise("PeerTimeout", py::make_tuple(e.rank, e.stage),
              py::dict("queue"_a = e.queue, "expected"_a = e.expected, "seen"_a = e.seen, "seconds"_a = e.seconds,
                       "reason"_a = e.reason));
    } catch (const hal::ascend::CapacityViolation& e) {
        raise("CapacityError", py::make_tuple(e.what_, e.needed, e.given, e.fix));
    } catch (const hal::ContractViolation& e) {
        raise("ContractError", py::make_tuple(e.what()));
    } catch (const hal::UnusableError& e) {
        raise("HalError", py::make_tuple(e.what()));
    }
}

}  // namespace

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
    py::register_local_exception_translator(&translate);
    hal::check_interrupts = [] {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    };
    bind_emulation(m);
    bind_kernels(m);
}
