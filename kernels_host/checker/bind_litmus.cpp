// SPDX-License-Identifier: Apache-2.0
// Python's way to litmus programs. Programs and profiles come as dicts made by hal/checker/engine.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checker/bind_checker.hpp"
#include "checker/litmus_search.hpp"

namespace py = pybind11;

namespace hal::checker {

Profile profile_from(const py::dict& d) {
    Profile p;
    p.name = d["name"].cast<std::string>();
    for (const auto& row : d["precedes"].cast<std::vector<std::tuple<int, int, int>>>())
        p.precedes[std::get<0>(row)][std::get<1>(row)][std::get<2>(row)] = true;
    p.origin_scope = d["origin_scope"].cast<bool>();
    p.at_issue = d["at_issue"].cast<bool>();
    p.source_read_at_issue = d["source_read_at_issue"].cast<bool>();
    p.quiet_source_is_remote = d["quiet_source_is_remote"].cast<bool>();
    p.none_is_relaxed = d["none_is_relaxed"].cast<bool>();
    p.weak_is_strong = d["weak_is_strong"].cast<bool>();
    p.bundled_is_strong = d["bundled_is_strong"].cast<bool>();
    p.build_strong_put = d["build_strong_put"].cast<bool>();
    p.build_strong_signal = d["build_strong_signal"].cast<bool>();
    p.one_submitter = d["one_submitter"].cast<bool>();
    p.max_put_bytes = d["max_put_bytes"].cast<std::size_t>();
    return p;
}

namespace {

template <typename T>
T get(const py::dict& d, const char* key, T otherwise) {
    return d.contains(key) ? d[key].cast<T>() : otherwise;
}

Instruction instruction_from(const py::dict& d) {
    Instruction in;
    in.what = static_cast<Do>(d["what"].cast<int>());
    in.rank = d["rank"].cast<int>();
    in.thread = d["thread"].cast<int>();
    in.peer = get(d, "peer", -1);
    in.queue = get(d, "queue", -1);
    in.order = static_cast<Order>(get(d, "order", 1));
    in.dst = get(d, "dst", 0);
    in.count = get(d, "count", 1);
    in.value = get(d, "value", 0);
    in.value_register = get(d, "value_register", -1);
    in.src = get(d, "src", -1);
    in.slot = get(d, "slot", -1);
    in.signal_value = get(d, "signal_value", 0);
    in.signal_op = static_cast<SignalOp>(get(d, "signal_op", 0));
    in.signal_order = static_cast<Order>(get(d, "signal_order", 1));
    in.remote = get(d, "remote", true);
    in.at_least = get(d, "at_least", 0);
    in.reg = get(d, "reg", -1);
    in.text = get(d, "text", std::string());
    return in;
}

}  // namespace

LitmusSource source_from(const py::dict& d) {
    LitmusSource s;
    s.ranks = d["ranks"].cast<int>();
    s.words = d["words"].cast<int>();
    s.registers = d["registers"].cast<int>();
    s.threads = d["threads"].cast<int>();
    s.barrier_threads = d["barrier_threads"].cast<int>();
    for (const auto& item : d["code"].cast<std::vector<py::dict>>()) s.code.push_back(instruction_from(item));
    for (const auto& [kind, value] : d["bad"].cast<std::vector<std::pair<int, int>>>())
        s.bad.push_back({static_cast<ConditionOp::Kind>(kind), value});
    return s;
}

void bind_litmus(py::module_& m) {
    m.def(
        "litmus_search",
        [](const py::dict& program, const py::dict& profile, std::uint64_t max_states, double max_seconds,
           bool sleep_sets) {
            const Compiled compiled = compile(source_from(program), profile_from(profile));
            LitmusVerdict v;
            {
                py::gil_scoped_release release;
                if (compiled.contract_error.empty()) v = search(compiled, {max_states, max_seconds, sleep_sets});
            }
            py::dict out;
            out["contract_error"] = compiled.contract_error;
            out["warnings"] = compiled.warnings;
            out["bad"] = v.bad;
            out["deadlock"] = v.deadlock;
            out["exhaustive"] = v.exhaustive;
            out["schedule"] = v.schedule;
            out["outcomes"] = v.outcomes;
            out["states"] = v.states;
            out["transitions"] = v.transitions;
            out["seconds"] = v.seconds;
            out["cpu_seconds"] = v.cpu_seconds;
            return out;
        },
        py::arg("program"), py::arg("profile"), py::arg("max_states"), py::arg("max_seconds"), py::arg("sleep_sets"));
}

}  // namespace hal::checker
