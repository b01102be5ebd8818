// SPDX-License-Identifier: Apache-2.0
#include "transport/bind_transport.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/stl.h>

#include "transport/any_fabric.hpp"
#include "transport/py_transport.hpp"
#include "transport/shm_fabric.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace hal {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

// An integer or an IntEnum member of hal.ordering, refused unless it is one of the `count` words.
template <typename Word>
Word word(int value, int count, const char* what) {
    if (value < 0 || value >= count)
        throw ContractViolation(std::string(what) + " must be a member of hal.ordering, not " + std::to_string(value));
    return static_cast<Word>(value);
}

void raise_in_hal_errors(const char* type, const char* text) {
    py::object cls = py::module_::import("hal.errors").attr(type);
    PyErr_SetString(cls.ptr(), text);
}

void raise_peer_timeout(const PeerTimeoutError& e) {
    try {
        py::object cls = py::module_::import("hal.errors").attr("PeerTimeout");
        py::object error = cls(e.rank, e.stage, "queue"_a = e.queue, "expected"_a = e.expected, "seen"_a = e.seen,
                               "seconds"_a = e.seconds, "reason"_a = e.reason);
        PyErr_SetObject(cls.ptr(), error.ptr());
    } catch (py::error_already_set& interrupt) {  // Python code ran, so a Ctrl-C may have come up in it
        interrupt.restore();
    }
}

void raise_masked(const MaskedError& e) {
    try {
        py::object cls = py::module_::import("hal.errors").attr("RankMasked");
        py::object error = cls(e.rank, e.by);
        PyErr_SetObject(cls.ptr(), error.ptr());
    } catch (py::error_already_set& interrupt) {
        interrupt.restore();
    }
}

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const PeerTimeoutError& e) {
        raise_peer_timeout(e);
    } catch (const MaskedError& e) {
        raise_masked(e);
    } catch (const ContractViolation& e) {
        raise_in_hal_errors("ContractError", e.what());
    } catch (const UnusableError& e) {
        raise_in_hal_errors("HalError", e.what());
    } catch (const std::system_error& e) {
        raise_in_hal_errors("HalError", e.what());
    }
}

void raise_pending_signals() {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void put_bytes(Transport& t, int window, int queue, int peer, std::size_t dst_offset, const py::buffer& src,
               int order) {
    const auto strength = word<Order>(order, 3, "order");
    py::buffer_info info = src.request();
    const auto nbytes = static_cast<std::size_t>(info.size * info.itemsize);
    py::gil_scoped_release unlocked;
    t.put(window, queue, peer, dst_offset, info.ptr, nbytes, strength);
}

void bind_base(py::module_& m) {
    py::class_<Transport, PyTransport>(
        m, "Transport", R"(Moves bytes between ranks; the base class of every transport of the host backend.

A transport written in Python overrides what is listed in hal_host/transport.py and gets the same compiled dispatch and
combine kernels as shared memory.)")
        .def(py::init<int, int, int>(), "rank"_a, "world_size"_a, "queues"_a)
        .def_property_readonly("rank", &Transport::rank)
        .def_property_readonly("world_size", &Transport::world_size)
        .def_property_readonly("queues", &Transport::queues)
        .def_property_readonly("failed", &Transport::failed, "A PeerTimeout was met: only close() is left.")
        .def("set_failed", &Transport::set_failed)
        .def("put", &put_bytes, "window"_a, "queue"_a, "peer"_a, "dst_offset"_a, "src"_a, "order"_a)
        .def(
            "signal",
            [](Transport& t, int window, int queue, int peer, std::size_t slot_offset, std::uint64_t value, int op,
               int order) {
                t.signal(window, queue, peer, slot_offset, value, word<SignalOp>(op, 2, "op"),
                         word<Order>(order, 3, "order"));
            },
            "window"_a, "queue"_a, "peer"_a, "slot_offset"_a, "value"_a, "op"_a, "order"_a, Unlocked())
        .def("wait", &Transport::wait, "window"_a, "slot_offset"_a, "at_least"_a, "source"_a, "queue"_a, "stage"_a,
             "timeout"_a, Unlocked())
        .def(
            "quiet",
            [](Transport& t, int queue, int peer, int scope) {
                t.quiet(queue, peer, word<QuietScope>(scope, 2, "scope"));
            },
            "queue"_a, "peer"_a, "scope"_a, Unlocked());
}

void bind_shm(py::module_& m) {
    py::class_<ShmSegment, std::shared_ptr<ShmSegment>>(m, "ShmSegment", py::buffer_protocol(),
                                                        "Mapped anonymous shared memory; a buffer of bytes.")
        .def_static("create", &ShmSegment::create, "nbytes"_a, "A new zeroed segment's file descriptor.")
        .def_buffer([](ShmSegment& s) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(s.data()), static_cast<py::ssize_t>(s.size()));
        });

    m.def("second_look", &second_look, "timeout"_a);
    py::class_<Announcement>(m, "Announcement")
        .def("__enter__", [](Announcement&) {})
        .def("__exit__", [](Announcement& announcement, const py::args&) { announcement.end(); });

    py::class_<ShmTransport, Transport>(m, "ShmTransport")
        .def(py::init<int, int, int, std::vector<int>>(), "rank"_a, "world_size"_a, "queues"_a, "links"_a)
        .def("map", &ShmTransport::map, "fds"_a, "nbytes"_a)
        .def("unmap", &ShmTransport::unmap, "window"_a)
        .def(
            "segment",
            [](const ShmTransport& t, int window) {
                return t.window(window)->segments[static_cast<std::size_t>(t.rank())];
            },
            "window"_a, "This rank's part.")
        .def(
            "find_fault",
            [](ShmTransport& t, int source, const std::optional<Members>& members) {
                return t.find_fault(source, members ? &*members : nullptr);
            },
            "source"_a, "members"_a = std::nullopt)
        .def(
            "root_of_stall",
            [](const ShmTransport& t, int source, const std::optional<Members>& members) {
                return t.root_of_stall(source, members ? &*members : nullptr);
            },
            "source"_a, "members"_a = std::nullopt)
        .def("mask_lost_ranks", &ShmTransport::mask_lost_ranks)
        .def("newest_view", &ShmTransport::newest_view)
        .def("leave_out", &ShmTransport::leave_out, "view"_a, "suspect"_a)
        .def("has_ended", &ShmTransport::has_ended, "peer"_a)
        .def("peer_word", &ShmTransport::peer_word, "window"_a, "peer"_a, "offset"_a)
        .def("announce", &ShmTransport::announce, "source"_a, "stage"_a, py::keep_alive<0, 1>())
        .def("publish_closed", &ShmTransport::publish_closed)
        .def("publish_failed", &ShmTransport::publish_failed, "fault_rank"_a, "reason"_a);
}

// The exporter must stay locked while C++ writes into its memory, and be unlocked under the GIL.
std::shared_ptr<void> hold(py::buffer_info&& info) {
    return {new py::buffer_info(std::move(info)), [](void* held) {
                py::gil_scoped_acquire gil;
                delete static_cast<py::buffer_info*>(held);
            }};
}

AnyFabric make_any_fabric(const py::object& transport, int window, double timeout) {
    py::buffer_info info = py::buffer(transport.attr("memory")(window)).request(true);
    auto* data = static_cast<std::byte*>(info.ptr);
    const auto nbytes = static_cast<std::size_t>(info.size * info.itemsize);
    return {transport.cast<Transport&>(), window, data, nbytes, timeout, hold(std::move(info))};
}

void bind_fabrics(py::module_& m) {
    py::class_<ShmFabric>(m, "ShmFabric", "One window of a ShmTransport, as kernels see it.")
        .def(py::init<ShmTransport&, int, double, std::optional<Members>>(), "transport"_a, "window"_a, "timeout"_a,
             "members"_a = std::nullopt, py::keep_alive<1, 2>())
        .def_property_readonly("size", &ShmFabric::size)
        .def(
            "signal",
            [](ShmFabric& f, int peer, std::size_t slot_offset, std::uint64_t value) {
                f.signal(0, peer, slot_offset, value, SignalOp::set, Order::strong);
            },
            "peer"_a, "slot_offset"_a, "value"_a, Unlocked(),
            "Sets a word of the window, strongly; nothing is checked.")
        .def(
            "wait",
            [](ShmFabric& f, std::size_t slot_offset, std::uint64_t at_least, int source, const std::string& stage) {
                return f.wait(slot_offset, at_least, source, 0, stage.c_str());
            },
            "slot_offset"_a, "at_least"_a, "source"_a, "stage"_a, Unlocked(),
            "Until this rank's word is so large; with members also until a later view is decided.");
    py::class_<AnyFabric>(m, "AnyFabric", "One window of any Transport, as kernels see it.")
        .def(py::init(&make_any_fabric), "transport"_a, "window"_a, "timeout"_a, py::keep_alive<1, 2>())
        .def_property_readonly("size", &AnyFabric::size);
}

}  // namespace

void bind_transport(py::module_& m) {
    check_interrupts = &raise_pending_signals;
    py::register_local_exception_translator(&translate);
    bind_base(m);
    bind_shm(m);
    bind_fabrics(m);
    m.def(
        "memory",
        [](std::uintptr_t ptr, std::size_t nbytes, bool readonly) {
            auto* address = reinterpret_cast<void*>(ptr);  // NOLINT(performance-no-int-to-ptr)
            return readonly
                       ? py::memoryview::from_memory(const_cast<const void*>(address), static_cast<py::ssize_t>(nbytes))
                       : py::memoryview::from_memory(address, static_cast<py::ssize_t>(nbytes));
        },
        "ptr"_a, "nbytes"_a, "readonly"_a, "Bytes at an address, which the caller keeps alive.");
}

}  // namespace hal
