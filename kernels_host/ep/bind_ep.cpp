// SPDX-License-Identifier: Apache-2.0
// Addresses cross this seam as integers: backends/hal_host/engine.py checked every shape and keeps every owner.
#include "ep/bind_ep.hpp"

#include <pybind11/stl.h>

#include "ep/kernels.hpp"
#include "ep/thread_fabric.hpp"
#include "transport/any_fabric.hpp"
#include "transport/shm_fabric.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace hal {

void bind_arithmetic(py::module_& m);

namespace {

using ep::CombineRound, ep::DispatchRound, ep::Kernels, ep::State;
using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

template <class Round>
void require_pending(const Round& round) {
    if (round.received) throw ContractViolation("this round was received already; each send has one receive");
}

template <class Fabric>
DispatchRound dispatch_send(Kernels<Fabric>& k, std::uint32_t slot, Address x, std::int32_t tokens, Address idx,
                            bool int64, Address weights, Address scales, const std::shared_ptr<State>& reused) {
    py::gil_scoped_release unlocked;
    return k.dispatch_send(
        slot, {at<std::byte>(x), tokens, at<void>(idx), int64, at<float>(weights), at<float>(scales)}, reused.get());
}

template <class Fabric>
void dispatch_recv(Kernels<Fabric>& k, DispatchRound& round, Address scales, Address idx, Address weights,
                   Address tokens_per_expert, Address offsets) {
    require_pending(round);
    py::gil_scoped_release unlocked;
    k.dispatch_recv(round, {at<float>(scales), at<std::int32_t>(idx), at<float>(weights),
                            at<std::int32_t>(tokens_per_expert), at<std::int64_t>(offsets)});
}

template <class Fabric>
CombineRound combine_send(Kernels<Fabric>& k, Address x, const std::shared_ptr<State>& state, Address weights,
                          bool returns_weights, bool weighted, bool kept) {
    py::gil_scoped_release unlocked;
    return k.combine_send({at<std::byte>(x), at<float>(weights), returns_weights, weighted, kept}, state);
}

template <class Fabric>
void combine_recv(Kernels<Fabric>& k, CombineRound& round, Address bias0, Address bias1, Address y, Address weights) {
    require_pending(round);
    const void* bias[] = {at<void>(bias0), at<void>(bias1)};
    py::gil_scoped_release unlocked;
    k.combine_recv(round, bias, int(bias0 != 0) + int(bias1 != 0), {at<void>(y), at<float>(weights)});
}

template <class Fabric>
void bind_kernels(py::module_& m, const char* name) {
    using K = Kernels<Fabric>;
    py::class_<K>(m, name, "Dispatch and combine of one rank over one window (kernels_host/ep/kernels.hpp).")
        .def(py::init<Fabric&, const EpShape&, ep::Element, const Members&>(), "fabric"_a, "shape"_a,
             "combine_element"_a, "members"_a = Members{}, py::keep_alive<1, 2>())
        .def("dispatch_send", &dispatch_send<Fabric>, "slot"_a, "x"_a, "tokens"_a, "topk_idx"_a, "idx_is_int64"_a,
             "topk_weights"_a, "scales"_a, "reused"_a)
        .def("rows", &K::rows, "round"_a)
        .def("end_round", &K::end_round)
        .def("received_x", &K::received_x, "round"_a, "Offset in the window of the rows that a round receives.")
        .def("dispatch_recv", &dispatch_recv<Fabric>, "round"_a, "scales"_a, "topk_idx"_a, "topk_weights"_a,
             "tokens_per_expert"_a, "expert_offsets"_a)
        .def("combine_send", &combine_send<Fabric>, "x"_a, "state"_a, "topk_weights"_a, "returns_weights"_a,
             "weighted"_a, "kept"_a)
        .def("combine_recv", &combine_recv<Fabric>, "round"_a, "bias0"_a, "bias1"_a, "y"_a, "topk_weights"_a);
}

template <class Fabric>
Address window_address(Fabric& fabric) {
    return reinterpret_cast<Address>(fabric.write(0, 0));
}

void bind_thread_fabric(py::module_& m) {
    using namespace ep;
    py::class_<ThreadWorld, std::shared_ptr<ThreadWorld>>(m, "ThreadWorld",
                                                          "Windows of ranks that are threads; for tests.")
        .def(py::init<int, int, std::size_t, double, bool>(), "ranks"_a, "queues"_a, "nbytes"_a, "timeout"_a, "lazy"_a)
        .def_readwrite("timeout", &ThreadWorld::timeout, "Seconds that bound every wait.");
    py::class_<ThreadFabric>(m, "ThreadFabric")
        .def(py::init<std::shared_ptr<ThreadWorld>, int>(), "world"_a, "rank"_a)
        .def_property_readonly("size", &ThreadFabric::size);
}

}  // namespace

void bind_ep(py::module_& m) {
    bind_arithmetic(m);
    py::enum_<ep::Element>(m, "Element")
        .value("bfloat16", ep::Element::bfloat16)
        .value("float16", ep::Element::float16)
        .value("float32", ep::Element::float32);
    py::class_<State, std::shared_ptr<State>>(m, "State", "What a dispatch remembers: its routing and its weights.")
        .def_property_readonly("tokens", [](const State& s) { return s.route->home.tokens; })
        .def_property_readonly("rows", [](const State& s) { return s.route->starts.back(); });
    py::class_<DispatchRound>(m, "DispatchRound")
        .def_readonly("slot", &DispatchRound::slot)
        .def_readonly("state", &DispatchRound::state);
    py::class_<CombineRound>(m, "CombineRound").def_readonly("state", &CombineRound::state);
    bind_thread_fabric(m);
    bind_kernels<ep::ThreadFabric>(m, "ThreadKernels");
    bind_kernels<ShmFabric>(m, "ShmKernels");
    bind_kernels<AnyFabric>(m, "AnyKernels");
    m.def("window_address", &window_address<ep::ThreadFabric>, "fabric"_a);
    m.def("window_address", &window_address<ShmFabric>, "fabric"_a);
    m.def("window_address", &window_address<AnyFabric>, "fabric"_a,
          "Address of this rank's part of the fabric's window.");
}

}  // namespace hal
