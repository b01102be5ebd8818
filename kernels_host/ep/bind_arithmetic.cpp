// SPDX-License-Identifier: Apache-2.0
// The shared arithmetic of hal/include/hal, as Python sees it: the shape, the buffer's breakdown, and what tests check.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ep/reduce.hpp"
#include "hal/buffer_layout.hpp"
#include "hal/credit.hpp"
#include "hal/epoch.hpp"
#include "hal/members.hpp"
#include "hal/placement.hpp"
#include "hal/queues.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace hal {
namespace {

void bind_shape(py::module_& m) {
    py::enum_<Layout>(m, "Layout").value("rank", Layout::rank).value("expert", Layout::expert);
    py::enum_<Schedule>(m, "Schedule")
        .value("direct", Schedule::direct)
        .value("hierarchical", Schedule::hierarchical)
        .value("latency", Schedule::latency);
    py::enum_<Completion>(m, "Completion")
        .value("strong_signal", Completion::strong_signal)
        .value("strong_signal_no_cqe", Completion::strong_signal_no_cqe)
        .value("strong_last", Completion::strong_last)
        .value("flag_in_block", Completion::flag_in_block);
    py::class_<EpShape>(m, "EpShape", "What decides the buffer of an ExpertParallel (hal/include/hal/shape.hpp).")
        .def(py::init<>())
        .def_readwrite("ranks", &EpShape::ranks)
        .def_readwrite("nodes", &EpShape::nodes)
        .def_readwrite("num_experts", &EpShape::num_experts)
        .def_readwrite("top_k", &EpShape::top_k)
        .def_readwrite("max_tokens", &EpShape::max_tokens)
        .def_readwrite("alignment", &EpShape::alignment)
        .def_readwrite("num_buffers", &EpShape::num_buffers)
        .def_readwrite("scale_dim", &EpShape::scale_dim)
        .def_readwrite("row_bytes", &EpShape::row_bytes)
        .def_readwrite("combine_row_bytes", &EpShape::combine_row_bytes)
        .def_readwrite("signal_stride", &EpShape::signal_stride)
        .def_readwrite("layout", &EpShape::layout)
        .def_readwrite("schedule", &EpShape::schedule)
        .def_readwrite("completion", &EpShape::completion)
        .def_readwrite("agreed", &EpShape::agreed);
    py::class_<Members>(m, "Members", "Who is left, in which view (hal/include/hal/members.hpp).")
        .def(py::init([](std::uint64_t view, std::uint64_t lost) { return Members{view, lost}; }), "view"_a = 0,
             "lost"_a = 0)
        .def_readonly("view", &Members::view)
        .def_readonly("lost", &Members::lost);
    m.def("shape_in_view", &shape_in_view, "shape"_a, "members"_a);
    m.def("most_maskable_ranks", &most_maskable_ranks);
    m.def(
        "agreed_word",
        [](const EpShape& shape, int rank) { return buffer_layout(shape).signal(Sig::agreed, std::uint64_t(rank)); },
        "shape"_a, "rank"_a, "Offset of a rank's word of agreement (kernels_host/ep/agreement.hpp).");
    m.def(
        "buffer_parts",
        [](const EpShape& shape) {
            const BufferLayout layout = buffer_layout(shape);
            std::vector<std::pair<std::string, std::uint64_t>> parts;
            for (int i = 0; i < buffer_parts(); ++i)
                parts.emplace_back(buffer_part_name(i), buffer_part_bytes(layout, i));
            return parts;
        },
        "shape"_a, "The symmetric buffer's parts, in order: [(name, bytes)]. Their sum is the window's size.");
}

// All slots and areas of a buffer as (name, offset, bytes), for a test that none overlap.
std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> buffer_map(const EpShape& s) {
    const BufferLayout l = buffer_layout(s);
    std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> all;
    const std::uint64_t slots = BufferLayout::slots_before(s, Sig::end);
    for (std::uint64_t i = 0; i < slots; ++i) all.emplace_back("signal", i * std::uint64_t(s.signal_stride), 8);
    for (std::uint64_t e = 0; e < 2 && l.header_bytes; ++e)
        for (int r = 0; r < s.ranks; ++r) all.emplace_back("header", l.header(e, r), l.header_bytes);
    const std::pair<const char*, RowArea> areas[] = {
        {"receive", l.receive}, {"rail", l.rail}, {"gather", l.gather}, {"home", l.home}};
    for (int b = 0; b < s.num_buffers; ++b) {
        for (int r = 0; r < s.ranks && l.counts_bytes; ++r)
            all.emplace_back("counts", l.count_message(std::uint64_t(b), r), l.counts_bytes);
        for (const auto& [name, area] : areas) {
            const RowArea a = BufferLayout::nth(area, std::uint64_t(b));
            if (!a.rows) continue;
            all.emplace_back(std::string(name) + ".x", a.x(0), a.rows * a.x_bytes);
            all.emplace_back(std::string(name) + ".meta", a.meta(0), a.rows * a.meta_bytes);
            if (a.block_row_bytes)
                all.emplace_back(std::string(name) + ".blocks", a.blocks(0), a.rows * a.block_row_bytes);
        }
    }
    return all;
}

void bind_placement(py::module_& m) {
    m.def(
        "group_starts",
        [](const EpShape& s, const std::vector<std::int32_t>& counts, int rank) {
            std::vector<std::int64_t> starts(std::size_t(groups(s)) + 1);
            group_starts(s, {counts.data(), destinations(s)}, rank, starts.data());
            return starts;
        },
        "shape"_a, "counts"_a, "rank"_a);
    m.def("receive_rows", &receive_rows, "shape"_a);
    m.def("buffer_map", &buffer_map, "shape"_a);
}

void bind_counting(py::module_& m) {
    m.def("reached", &reached, "seen"_a, "wanted"_a);
    m.def("wanted_credit", &wanted_credit, "round"_a, "depth"_a);
    m.def("ring_fits", &ring_fits, "head"_a, "tail"_a, "need"_a, "depth"_a, "guard"_a);
    m.def("queue_of", &queue_of, "n"_a, "queues"_a);
    m.def("last_on_queue", &last_on_queue, "total"_a, "queue"_a, "queues"_a);
    m.def(
        "ready_round_trip",
        [](std::uint64_t epoch, std::uint32_t slot, bool reuse, std::uint32_t tag) {
            const Ready r = ready_of(ready_word({epoch, slot, reuse, tag}));
            return py::make_tuple(r.epoch, r.slot, r.reuse, r.tag);
        },
        "epoch"_a, "slot"_a, "reuse"_a, "tag"_a);
    py::class_<FinishedRounds>(m, "FinishedRounds")
        .def(py::init<>())
        .def("finish", &FinishedRounds::finish, "round"_a)
        .def_readonly("all_until", &FinishedRounds::all_until);
}

}  // namespace

void bind_arithmetic(py::module_& m) {
    bind_shape(m);
    bind_placement(m);
    bind_counting(m);
    m.def(
        "sum_rows",
        [](ep::Element element, const std::vector<std::uintptr_t>& rows, const std::vector<float>& weights,
           std::size_t width, std::uintptr_t y) {
            ep::Sum sum;
            sum.rows = reinterpret_cast<const void* const*>(rows.data());
            sum.weights = weights.empty() ? nullptr : weights.data();
            sum.count = int(rows.size());
            ep::sum_rows(element, sum, width, reinterpret_cast<void*>(y));  // NOLINT(performance-no-int-to-ptr)
        },
        "element"_a, "rows"_a, "weights"_a, "width"_a, "y"_a,
        "y = sum of rows at these addresses, as combine sums them.");
}

}  // namespace hal
