// SPDX-License-Identifier: Apache-2.0
// Dispatch and combine, and the emulated session, as Python sees them. Addresses cross as integers: the Python side checked
// every shape and keeps every owner.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "launch/emulated_session.hpp"
#include "launch/ep_host.hpp"

namespace py = pybind11;
using namespace py::literals;
using namespace hal::ascend;

namespace {

using hal::EpShape;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// EpShape is hal_host._engine's type: one set of settings for both.
struct WorldEngines {
    explicit WorldEngines(hal::udma::World& world) : clock(world) {
        for (int pe = 0; pe < world.size(); ++pe)
            runtimes.push_back(std::make_shared<EmulatedRuntime>(world.device(pe), &clock));
    }
    WorldClock clock;
    std::vector<std::shared_ptr<Runtime>> runtimes;
};

template <class Round>
void require_pending(const Round& round) {
    if (round.received) throw hal::ContractViolation("this round was received already; each send has one receive");
}

void bind_rounds(py::module_& m) {
    py::class_<State, std::shared_ptr<State>>(m, "State", "What a dispatch remembers, in device memory.")
        .def_property_readonly("tokens", &State::tokens);
    py::class_<DispatchRound>(m, "DispatchRound")
        .def_readonly("slot", &DispatchRound::slot)
        .def_readonly("state", &DispatchRound::state);
    py::class_<CombineRound>(m, "CombineRound").def_readonly("state", &CombineRound::state);
}

void bind_ep_host(py::module_& m) {
    py::class_<EpHost>(m, "Kernels", "Dispatch and combine of one rank (kernels_ascend/launch/ep_host.hpp).")
        .def(py::init([](std::shared_ptr<EmulatedSession> session, const EpShape& shape, int rank, int element,
                         std::uint64_t window, double timeout, int cores) {
                 const int queues = session->queues();
                 return std::make_unique<EpHost>(std::move(session), shape, rank, queues, element, window, timeout,
                                                 cores);
             }),
             "session"_a, "shape"_a, "rank"_a, "element"_a, "window"_a, "timeout"_a, "cores"_a)
        .def(py::init([](WorldEngines& engines, const EpShape& shape, int rank, int queues, int element,
                         std::uint64_t window, double timeout, int cores) {
                 return std::make_unique<EpHost>(engines.runtimes.at(std::size_t(rank)), shape, rank, queues, element,
                                                 window, timeout, cores);
             }),
             "engines"_a, "shape"_a, "rank"_a, "queues"_a, "element"_a, "window"_a, "timeout"_a, "cores"_a,
             py::keep_alive<1, 2>())
        .def(
            "dispatch_send",
            [](EpHost& k, std::uint32_t slot, std::uint64_t x, std::int32_t tokens, std::uint64_t idx, bool int64,
               std::uint64_t weights, std::uint64_t scales, const std::shared_ptr<State>& reused) {
                return k.dispatch_send(slot, {x, tokens, idx, int64, weights, scales}, reused.get());
            },
            "slot"_a, "x"_a, "tokens"_a, "topk_idx"_a, "idx_is_int64"_a, "topk_weights"_a, "scales"_a, "reused"_a,
            Unlocked())
        .def("rows", &EpHost::rows, "round"_a)
        .def("received_x", &EpHost::received_x, "round"_a, "Offset in the window of the rows that a round receives.")
        .def(
            "dispatch_recv",
            [](EpHost& k, DispatchRound& round, std::uint64_t scales, std::uint64_t idx, std::uint64_t weights,
               std::uint64_t tokens_per_expert, std::uint64_t offsets) {
                require_pending(round);
                k.dispatch_recv(round, {scales, idx, weights, tokens_per_expert, offsets});
            },
            "round"_a, "scales"_a, "topk_idx"_a, "topk_weights"_a, "tokens_per_expert"_a, "expert_offsets"_a,
            Unlocked())
        .def("combine_send", &EpHost::combine_send, "x"_a, "state"_a, "topk_weights"_a, "returns_weights"_a,
             "weighted"_a, Unlocked())
        .def(
            "combine_recv",
            [](EpHost& k, CombineRound& round, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t y,
               std::uint64_t weights) {
                require_pending(round);
                k.combine_recv(round, bias0, bias1, y, weights);
            },
            "round"_a, "bias0"_a, "bias1"_a, "y"_a, "topk_weights"_a, Unlocked())
        .def_property_readonly("traffic", [](const EpHost& k) {
            const Traffic& t = k.traffic();
            py::dict d;
            d["data_bytes"] = t.data_bytes, d["flag_bytes"] = t.flag_bytes, d["signal_bytes"] = t.signal_bytes;
            d["rows"] = t.rows, d["signals"] = t.signals;
            return d;
        });
    m.def("window_bytes", &window_bytes, "shape"_a, "Of the symmetric window that all backends share.");
    m.def("staging_bytes", &staging_bytes, "shape"_a, "Of the registered staging behind it.");
    m.def("require_ring", &require_ring, "shape"_a, "sq_depth"_a);
}

void bind_session(py::module_& m) {
    py::class_<WorldEngines>(
        m, "WorldEngines",
        "Runs the kernels of a World's PEs, one thread for each; enter() and leave() around its work.")
        .def(py::init<hal::udma::World&>(), "world"_a, py::keep_alive<1, 2>())
        .def(
            "enter", [](WorldEngines& e) { e.clock.enter(); }, Unlocked())
        .def("leave", [](WorldEngines& e) { e.clock.leave(); }, Unlocked());
    py::class_<EmulatedSession, std::shared_ptr<EmulatedSession>>(
        m, "EmulatedSession", "One rank's emulated device over shared-memory windows.")
        .def(py::init([](hal::ShmTransport& transport, int queues, std::uint32_t sq_depth, std::uint32_t cq_depth) {
                 return std::make_shared<EmulatedSession>(transport, SessionOptions{queues, sq_depth, cq_depth});
             }),
             "transport"_a, "queues"_a, "sq_depth"_a, "cq_depth"_a, py::keep_alive<1, 2>())
        .def("attach", &EmulatedSession::attach, "window"_a)
        .def("detach", &EmulatedSession::detach, "window"_a)
        .def(
            "put",
            [](EmulatedSession& s, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int peer, int queue,
               int order) { s.put(dst, src, bytes, peer, queue, hal::Order(order)); },
            "dst"_a, "src"_a, "bytes"_a, "peer"_a, "queue"_a, "order"_a, Unlocked())
        .def(
            "signal",
            [](EmulatedSession& s, std::uint64_t slot, std::uint64_t value_at, int peer, std::uint64_t value, int op,
               int queue,
               int order) { s.signal(slot, value_at, peer, value, hal::SignalOp(op), queue, hal::Order(order)); },
            "slot"_a, "value_at"_a, "peer"_a, "value"_a, "op"_a, "queue"_a, "order"_a, Unlocked())
        .def("wait", &EmulatedSession::wait, "slot"_a, "at_least"_a, "source"_a, "timeout"_a, Unlocked())
        .def("quiet", &EmulatedSession::quiet, "queue"_a, "peer"_a, Unlocked())
        .def_property_readonly("counters", [](const EmulatedSession& s) {
            const auto& c = s.counters();
            py::dict d;
            d["wqes"] = c.requests, d["cqes"] = c.completions, d["doorbells"] = c.doorbells, d["quiets"] = c.quiets;
            d["bytes"] = c.bytes;
            return d;
        });
}

}  // namespace

void bind_kernels(py::module_& m) {
    py::module_::import("hal_host._engine");  // EpShape and ShmTransport are its types
    bind_rounds(m);
    bind_ep_host(m);
    bind_session(m);
}
