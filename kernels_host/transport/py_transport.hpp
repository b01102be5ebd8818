// SPDX-License-Identifier: Apache-2.0
// Lets Python subclasses of Transport be called by C++ kernels. Each call takes the GIL for its own duration only.
#pragma once
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <string>

#include "transport/transport.hpp"

namespace hal {

class PyTransport : public Transport {
  public:
    using Transport::Transport;

    void put(int window, int queue, int peer, std::size_t dst_offset, const void* src, std::size_t nbytes,
             Order order) override {
        pybind11::gil_scoped_acquire gil;
        call("put", window, queue, peer, dst_offset,
             pybind11::memoryview::from_memory(src, static_cast<pybind11::ssize_t>(nbytes)), member("Order", order));
    }
    void signal(int window, int queue, int peer, std::size_t slot_offset, std::uint64_t value, SignalOp op,
                Order order) override {
        pybind11::gil_scoped_acquire gil;
        call("signal", window, queue, peer, slot_offset, value, member("SignalOp", op), member("Order", order));
    }
    std::uint64_t wait(int window, std::size_t slot_offset, std::uint64_t at_least, int source, int queue,
                       const std::string& stage, double timeout) override {
        pybind11::gil_scoped_acquire gil;
        try {
            return call("wait", window, slot_offset, at_least, source, queue, stage, timeout).cast<std::uint64_t>();
        } catch (const pybind11::error_already_set& e) {
            if (e.matches(pybind11::module_::import("hal.errors").attr("PeerTimeout"))) set_failed();
            throw;
        }
    }
    void quiet(int queue, int peer, QuietScope scope) override {
        pybind11::gil_scoped_acquire gil;
        call("quiet", queue, peer, member("QuietScope", scope));
    }

  private:
    template <typename... Args>
    pybind11::object call(const char* name, Args&&... args) {
        pybind11::function method = pybind11::get_override(static_cast<const Transport*>(this), name);
        if (!method) throw ContractViolation(std::string("this transport does not override Transport.") + name);
        return method(std::forward<Args>(args)...);
    }

    // The member of hal.ordering's enum `type` with this value.
    template <typename Word>
    static pybind11::object member(const char* type, Word value) {
        return ordering().attr(type)(static_cast<int>(value));
    }
    static const pybind11::object& ordering() {
        PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<pybind11::object> module;
        return module
            .call_once_and_store_result([] { return pybind11::object(pybind11::module_::import("hal.ordering")); })
            .get_stored();
    }
};

}  // namespace hal
