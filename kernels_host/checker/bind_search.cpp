// SPDX-License-Identifier: Apache-2.0
// Python's way to the schedule searches, the happens-before pass, and single runs for pictures.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checker/bind_checker.hpp"
#include "checker/ep_subject.hpp"
#include "checker/explore.hpp"
#include "checker/happens_before.hpp"
#include "checker/litmus_subject.hpp"
#include "checker/masking_subject.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace hal::checker {
namespace {

py::dict dict_from(const RunReport& r) {
    return py::dict("failure"_a = r.failure, "kind"_a = r.kind, "steps"_a = r.steps);
}

py::dict dict_from(const SearchResult& r) {
    py::dict d = dict_from(r.failure);
    d["exhaustive"] = r.exhaustive;
    d["bound"] = r.bound;
    d["runs"] = r.runs;
    d["total_steps"] = r.steps;
    d["longest"] = r.longest;
    d["seconds"] = r.seconds;
    d["schedule"] = r.failure.failed() ? to_text(r.schedule) : "";
    d["outcomes"] = std::vector<std::vector<std::uint8_t>>(r.outcomes.begin(), r.outcomes.end());
    return d;
}

const char* name_of(What w) {
    static const char* names[] = {"read", "write", "issue",  "source_read", "deliver",
                                  "wait", "quiet", "arrive", "pass",        "end"};
    return names[int(w)];
}

py::list events_of(const World& w) {
    py::list out;
    for (const Event& e : w.log()) {
        py::dict d("what"_a = name_of(e.what), "thread"_a = e.thread, "rank"_a = e.rank, "begin"_a = e.begin,
                   "end"_a = e.end, "value"_a = e.value, "stage"_a = e.stage ? e.stage : "");
        if (e.what == What::issue || e.what == What::source_read || e.what == What::deliver) {
            const Operation& op = w.operations()[e.operation];
            d["operation"] = e.operation;
            d["peer"] = op.peer;
            d["queue"] = op.queue;
            d["name"] = w.name(e.operation);
            d["is_signal"] = op.is_signal;
            d["entity"] = std::to_string(op.thread) + "." + std::to_string(op.number);
        }
        out.append(d);
    }
    return out;
}

py::list calls_of(const World& w) {
    static const char* primitives[] = {"put", "signal", "wait", "quiet"};
    py::list out;
    for (const Call& c : w.calls())
        out.append(py::dict("primitive"_a = primitives[int(c.primitive)], "thread"_a = c.thread, "number"_a = c.number,
                            "order"_a = int(c.order), "remote"_a = c.remote, "peer"_a = c.peer, "queue"_a = c.queue,
                            "offset"_a = c.offset, "bytes"_a = c.bytes, "value"_a = c.value, "stage"_a = c.stage));
    return out;
}

SearchLimits limits_from(std::uint64_t max_runs, double max_seconds, bool stop) {
    return {max_runs, max_seconds, stop};
}

EpScenario scenario_from(const py::dict& d) {
    EpScenario s;
    s.shape = d["shape"].cast<EpShape>();
    s.queues = d["queues"].cast<int>();
    s.rounds = d["rounds"].cast<int>();
    s.in_flight = d["in_flight"].cast<int>();
    s.combines = d["combines"].cast<int>();
    s.halves = d["halves"].cast<bool>();
    s.reuse_handle = d["reuse_handle"].cast<bool>();
    s.weights_back = d["weights_back"].cast<bool>();
    s.tokens = d["tokens"].cast<std::vector<std::int32_t>>();
    s.topk_idx = d["topk_idx"].cast<std::vector<std::vector<std::int32_t>>>();
    s.piece_bytes = d["piece_bytes"].cast<std::size_t>();
    return s;
}

std::optional<OperationName> operation_from(const py::dict& d, const char* key) {
    if (!d.contains(key)) return std::nullopt;
    const auto [thread, number] = d[key].cast<std::pair<int, std::uint32_t>>();
    return OperationName{std::uint16_t(thread), number};
}

Faults faults_from(const py::dict& d) {
    Faults f;
    f.lost = operation_from(d, "lost");
    f.lost_completion = operation_from(d, "lost_completion");
    f.error_completion = operation_from(d, "error_completion");
    for (const char* key : {"stalled", "stalled_too"})
        if (d.contains(key)) f.stalled.push_back(d[key].cast<std::pair<int, std::uint32_t>>());
    if (d.contains("idle_at_end")) f.idle_at_end = d["idle_at_end"].cast<bool>();
    if (d.contains("resume")) f.resume = static_cast<Faults::Resume>(d["resume"].cast<int>());
    if (d.contains("ring_entries")) f.ring_entries = d["ring_entries"].cast<std::uint32_t>();
    return f;
}

py::dict one_run(Subject& s, const std::string& schedule, bool events) {
    py::dict d;
    RunReport r = run(s, schedule_from(schedule), true, [&](World& w) {
        if (events) d["events"] = events_of(w);
        d["calls"] = calls_of(w);
        d["waiting"] = w.all_ended() ? "" : w.waiting_text();
        py::dict names;
        for (const TimedOut& t : w.timed_out()) names[py::int_(w.rank_of(int(t.thread)))] = t.names;
        d["timed_out"] = names;
        d["operations"] = w.operations().size();
        d["outcome"] = s.outcome(w);
    });
    for (const auto& item : dict_from(r)) d[item.first] = item.second;
    return d;
}

py::dict races(Subject& s, std::size_t max_races, std::size_t max_bytes) {
    RaceVerdict v;
    RunReport r;
    {
        py::gil_scoped_release unlocked;
        r = run(s, {}, true, [&](World& w) { v = find_races(w, {max_races, max_bytes}); });
    }
    py::dict d = dict_from(r);
    py::list list;
    for (const Race& race : v.races)
        list.append(py::dict("rank"_a = race.rank, "begin"_a = race.begin, "end"_a = race.end, "first"_a = race.first,
                             "second"_a = race.second, "text"_a = race.text()));
    d["races"] = list;
    d["events"] = v.events;
    d["judged"] = v.judged;
    d["stopped"] = r.stopped;
    d["passes"] = v.passes;
    d["settled"] = v.settled;
    d["seconds"] = v.seconds;
    return d;
}

}  // namespace

void bind_search(py::module_& m) {
    py::class_<Subject>(m, "Subject", "Something to check; made by LitmusSubject or EpSubject.");
    py::class_<LitmusSubject, Subject>(m, "LitmusSubject")
        .def(py::init([](const py::dict& program, const py::dict& profile, const py::dict& faults) {
                 return std::make_unique<LitmusSubject>(source_from(program), profile_from(profile),
                                                        faults_from(faults));
             }),
             "program"_a, "profile"_a, "faults"_a = py::dict());
    py::class_<EpSubject, Subject>(m, "EpSubject")
        .def(py::init([](const py::dict& scenario, const py::dict& profile, std::size_t max_bytes) {
                 return std::make_unique<EpSubject>(scenario_from(scenario), profile_from(profile), max_bytes);
             }),
             "scenario"_a, "profile"_a, "max_bytes"_a = std::size_t{1} << 30)
        .def(
            "set_faults", [](EpSubject& s, const py::dict& faults) { s.set_faults(faults_from(faults)); }, "faults"_a)
        .def("set_track", &EpSubject::set_track, "track"_a)
        .def("set_least_waits", &EpSubject::set_least_waits, "least"_a)
        .def(
            "set_mutation",
            [](EpSubject& s, int kind, int thread, std::uint32_t number) {
                s.set_mutation(kind < 0 ? std::nullopt
                                        : std::optional(Mutation{static_cast<Mutation::Kind>(kind),
                                                                 std::uint16_t(thread), number}));
            },
            "kind"_a, "thread"_a = 0, "number"_a = 0)
        .def("ended", &EpSubject::ended, "rank"_a)
        .def(
            "output",
            [](const EpSubject& s, int rank) {
                const auto& o = s.output(rank);
                return py::bytes(reinterpret_cast<const char*>(o.data()), o.size());
            },
            "rank"_a);
    py::class_<MaskingSubject, Subject>(m, "MaskingSubject")
        .def(py::init([](const py::dict& scenario, const py::dict& profile) {
                 return std::make_unique<MaskingSubject>(scenario_from(scenario), profile_from(profile));
             }),
             "scenario"_a, "profile"_a)
        .def(
            "set_faults", [](MaskingSubject& s, const py::dict& faults) { s.set_faults(faults_from(faults)); },
            "faults"_a)
        .def("set_track", &MaskingSubject::set_track, "track"_a)
        .def(
            "set_mutation",
            [](MaskingSubject& s, int kind, int thread, std::uint32_t number) {
                s.set_mutation(Mutation{static_cast<Mutation::Kind>(kind), std::uint16_t(thread), number});
            },
            "kind"_a, "thread"_a, "number"_a)
        .def("calls", &MaskingSubject::calls, "rank"_a, "Calls that a rank made in the last run.")
        .def("end", &MaskingSubject::end, "rank"_a, "How a rank's last run ended: went on, masked, stopped.")
        .def(
            "output",
            [](const MaskingSubject& s, int rank) {
                const auto& o = s.output(rank);
                return py::bytes(reinterpret_cast<const char*>(o.data()), o.size());
            },
            "rank"_a);
    m.def(
        "explore_all",
        [](Subject& s, std::uint64_t max_runs, double max_seconds, bool stop) {
            py::gil_scoped_release unlocked;
            SearchResult r = explore_all(s, limits_from(max_runs, max_seconds, stop));
            py::gil_scoped_acquire locked;
            return dict_from(r);
        },
        "subject"_a, "max_runs"_a, "max_seconds"_a, "stop_at_failure"_a);
    m.def(
        "explore_delays",
        [](Subject& s, int bound, std::uint64_t max_runs, double max_seconds, bool stop) {
            py::gil_scoped_release unlocked;
            SearchResult r = explore_delays(s, bound, limits_from(max_runs, max_seconds, stop));
            py::gil_scoped_acquire locked;
            return dict_from(r);
        },
        "subject"_a, "bound"_a, "max_runs"_a, "max_seconds"_a, "stop_at_failure"_a);
    m.def(
        "explore_random",
        [](Subject& s, std::uint64_t seed, std::uint64_t runs, int depth, double max_seconds, bool stop) {
            py::gil_scoped_release unlocked;
            SearchResult r = explore_random(s, seed, runs, depth, limits_from(runs, max_seconds, stop));
            py::gil_scoped_acquire locked;
            return dict_from(r);
        },
        "subject"_a, "seed"_a, "runs"_a, "depth"_a, "max_seconds"_a, "stop_at_failure"_a);
    m.def(
        "shrink",
        [](Subject& s, const std::string& schedule, const std::string& kind) {
            py::gil_scoped_release unlocked;
            return to_text(shrink(s, schedule_from(schedule), kind));
        },
        "subject"_a, "schedule"_a, "kind"_a);
    m.def("run", &one_run, "subject"_a, "schedule"_a, "events"_a = false);
    m.def("find_races", &races, "subject"_a, "max_races"_a = 20, "max_bytes"_a = std::size_t{1} << 30);
}

}  // namespace hal::checker
