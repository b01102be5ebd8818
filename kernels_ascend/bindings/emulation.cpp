// SPDX-License-Identifier: Apache-2.0
// The emulator for tests and for the checker: a World, and cores driven from Python one library call at a time.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "emulation/submit.hpp"
#include "emulation/world.hpp"

namespace py = pybind11;
using namespace hal::udma;

namespace {

std::uint32_t odr_of(const std::string& name) {
    if (name == "no") return 0;
    if (name == "relax") return 5;
    if (name == "strong") return 6;
    throw py::value_error("order must be no, relax or strong");
}

Pipe pipe_of(const std::string& name) { return name == "scalar" ? Pipe::scalar : Pipe::mte3; }

// An open batch of deferred requests: its count and its descriptor scratch.
struct ScriptBatch {
    std::uint32_t pending = 0;
    void* scratch = nullptr;
};

// A core of one PE; addresses are offsets into its heap.
struct ScriptCore {
    Device& device;
    Core& core;
    void* scratch;

    ScriptCore(Device& d, int block) : device(d), core(d.script_core(block)), scratch(core.allocate_scratch(8192)) {}

    std::uint64_t at(std::uint64_t offset) const {
        return reinterpret_cast<std::uint64_t>(device.heaps()[device.pe()].windows[0].base) + offset;
    }
    Queue& queue(int pe, std::uint32_t qp) { return device.engine.queue(pe, qp); }

    std::shared_ptr<ScriptBatch> batch(std::uint32_t scratch_bytes) {
        auto b = std::make_shared<ScriptBatch>();
        b->scratch = core.allocate_scratch(scratch_bytes);
        return b;
    }

    void post_kind(Opcode opcode, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes, int pe, std::uint32_t qp,
                   const std::string& order, std::uint32_t cqe, const std::string& action, const std::string& pipe,
                   const std::shared_ptr<ScriptBatch>& batch, std::uint64_t signal, std::uint64_t operand,
                   std::uint64_t compare, std::uint32_t se, std::uint32_t fence, std::uint32_t sync_id) {
        CoreScope scope(core);
        Post p;
        p.config = {cqe, se, fence, odr_of(order)};
        p.pipe = pipe_of(pipe);
        p.action = action == "defer" ? Action::defer : action == "submit" ? Action::submit : Action::immediate;
        p.opcode = opcode;
        p.dst = at(dst);
        p.src = opcode == Opcode::fetch_add || opcode == Opcode::compare_swap ? 0 : at(src);
        p.bytes = bytes;
        p.signal_address = opcode == Opcode::write_notify ? at(signal) : 0;
        p.operand = operand;
        p.compare = compare;
        p.pe = pe;
        p.qp = qp;
        p.scratch = batch ? batch->scratch : scratch;
        p.sync_id = sync_id;
        p.pending_count = batch ? &batch->pending : nullptr;
        post(core, p);
    }

    Request raw(std::uint64_t dst, std::uint64_t src, std::uint32_t bytes, int pe, std::uint32_t odr, bool cqe) {
        Request r;
        r.remote = device.to_remote(at(dst), pe);
        r.local = at(src);
        r.bytes = bytes;
        r.odr = static_cast<std::uint8_t>(odr);
        r.cqe = cqe;
        return r;
    }

    void store_wqe(std::uint64_t dst, std::uint64_t src, std::uint32_t bytes, int pe, std::uint32_t qp,
                   std::uint32_t odr, bool cqe) {
        CoreScope scope(core);
        Block built[2];
        encode(raw(dst, src, bytes, pe, odr, cqe), built);
        Queue& q = queue(pe, qp);
        store_block(core, q, q.head, built[0]);
        ++q.head;
    }

    void or_order(int pe, std::uint32_t qp, std::uint32_t index, std::uint32_t odr, bool cqe, bool clear) {
        CoreScope scope(core);
        Queue& q = queue(pe, qp);
        auto* word = &q.sq[index % device.engine.config.sq_depth].word[0];
        std::uint64_t value = core.load(word);
        if (clear) value &= ~kOdrMask;
        value |= (std::uint64_t{odr} << kOdrShift) | (cqe ? kCqeBit : 0);
        core.store(word, value);
    }

    void wait_until(std::uint64_t offset, std::uint64_t at_least, bool invalidate) {
        CoreScope scope(core);
        auto* word = reinterpret_cast<std::uint64_t*>(at(offset));
        for (int turns = 0;; ++turns) {
            if (invalidate) core.flush_line(word);
            if (core.load(word) >= at_least) return;
            core.pause();
        }
    }
};

EngineConfig make_config(std::uint32_t qp_num, std::uint32_t sq_depth, std::uint32_t cq_depth,
                         std::uint32_t first_index, std::uint32_t chunk_bytes, bool quiet_covers_no, bool direct_mode,
                         std::uint64_t seed, Mutation mutation) {
    EngineConfig c;
    c.qp_num = qp_num, c.sq_depth = sq_depth, c.cq_depth = cq_depth, c.first_index = first_index;
    c.chunk_bytes = chunk_bytes, c.quiet_covers_no = quiet_covers_no, c.direct_mode = direct_mode, c.seed = seed;
    c.mutation = mutation;
    return c;
}

py::dict counters_of(const Device& device) {
    const Counters& c = device.engine.counters;
    py::dict d;
    d["wqes"] = c.requests, d["cqes"] = c.completions, d["doorbells"] = c.doorbells, d["quiets"] = c.quiets;
    d["bytes"] = c.bytes;
    return d;
}

py::dict queue_state(Device& device, int target, std::uint32_t qp) {
    const Queue& q = device.engine.queue(target, qp);
    py::dict d;
    d["head"] = q.head, d["tail"] = q.tail, d["cqe_cnt"] = q.cqe_cnt, d["cq_tail"] = q.cq_tail;
    d["doorbell"] = q.doorbell, d["cq_doorbell"] = q.cq_doorbell, d["taken"] = q.taken;
    d["in_flight"] = q.in_flight.size();
    return d;
}

void bind_enums(py::module_& m) {
    py::enum_<Mutation> mutation(m, "Mutation");
    mutation.value("none", Mutation::none)
        .value("default_no", Mutation::default_no)
        .value("strong_on_other_queue", Mutation::strong_on_other_queue)
        .value("drop_empty_signal", Mutation::drop_empty_signal)
        .value("batch_of_129", Mutation::batch_of_129)
        .value("no_flush", Mutation::no_flush)
        .value("flush_first_span_only", Mutation::flush_first_span_only)
        .value("ring_before_copy", Mutation::ring_before_copy)
        .value("early_source_reuse", Mutation::early_source_reuse)
        .value("constant_one", Mutation::constant_one)
        .value("signal_before_quiet", Mutation::signal_before_quiet)
        .value("early_reclaim", Mutation::early_reclaim)
        .value("wait_on_wrong_slot", Mutation::wait_on_wrong_slot)
        .value("ignore_cqe_status", Mutation::ignore_cqe_status)
        .value("keep_relaxed_bits", Mutation::keep_relaxed_bits);
    py::enum_<Strategy>(m, "Strategy")
        .value("mixed", Strategy::mixed)
        .value("uniform", Strategy::uniform)
        .value("priorities", Strategy::priorities)
        .value("cores_first", Strategy::cores_first)
        .value("engines_first", Strategy::engines_first)
        .value("starve_queue", Strategy::starve_queue);
}

void bind_world(py::module_& m) {
    py::class_<World>(m, "World", "Every PE of a run under one deterministic scheduler.")
        .def(py::init([](int pes, std::uint64_t heap_bytes, std::uint32_t qp_num, std::uint32_t sq_depth,
                         std::uint32_t cq_depth, std::uint32_t first_index, std::uint32_t chunk_bytes,
                         bool quiet_covers_no, bool direct_mode, std::uint64_t seed, Mutation mutation,
                         Strategy strategy) {
                 return std::make_unique<World>(pes, heap_bytes,
                                                make_config(qp_num, sq_depth, cq_depth, first_index, chunk_bytes,
                                                            quiet_covers_no, direct_mode, seed, mutation),
                                                strategy);
             }),
             py::arg("pes"), py::arg("heap_bytes"), py::kw_only(), py::arg("qp_num") = 2, py::arg("sq_depth") = 32768,
             py::arg("cq_depth") = 32768, py::arg("first_index") = 0, py::arg("chunk_bytes") = 0,
             py::arg("quiet_covers_no") = false, py::arg("direct_mode") = true, py::arg("seed") = 0,
             py::arg("mutation") = Mutation::none, py::arg("strategy") = Strategy::mixed)
        .def_property_readonly("size", &World::size)
        .def("heap",
             [](World& w, int pe) {
                 const Region& r = w.device(pe).heaps()[pe].windows[0];
                 return py::memoryview::from_memory(r.base, static_cast<py::ssize_t>(r.bytes), false);
             })
        .def(
            "core", [](World& w, int pe, int block) { return ScriptCore(w.device(pe), block); }, py::arg("pe"),
            py::arg("block") = 0, py::keep_alive<0, 1>())
        .def(
            "enabled",
            [](World& w) {
                std::vector<std::string> texts;
                for (const Choice& c : w.enabled()) texts.push_back(c.text());
                return texts;
            },
            "What may happen next, as text; take(i) does the i-th.")
        .def("take",
             [](World& w, std::size_t i) {
                 w.enabled();
                 w.take(i);
             })
        .def("settle", &World::settle, "Every engine step there is.")
        .def("run", &World::run, py::call_guard<py::gil_scoped_release>(), "To the end; returns the number of steps.")
        .def_property_readonly("idle", &World::idle)
        .def_property_readonly("steps", &World::steps)
        .def_property_readonly("warnings", &World::warnings)
        .def_property_readonly(
            "recent",
            [](const World& w) {
                static constexpr const char* kinds[] = {"take", "land", "report"};
                py::list events;
                for (const Event& e : w.recent()) {
                    py::dict event;
                    event["what"] = kinds[int(e.kind)];
                    event["pe"] = e.pe, event["target"] = e.target, event["qp"] = e.qp;
                    event["operation"] = e.operation, event["bytes"] = e.bytes, event["odr"] = int(e.odr);
                    event["notifies"] = e.notifies, event["landed"] = e.landed, event["pieces"] = e.pieces;
                    events.append(event);
                }
                return events;
            },
            "The last steps of all engines, oldest first.")
        .def("counters", [](World& w, int pe) { return counters_of(w.device(pe)); })
        .def("queue",
             [](World& w, int pe, int target, std::uint32_t qp) { return queue_state(w.device(pe), target, qp); })
        .def(
            "inject",
            [](World& w, int pe, int target, std::uint32_t qp, const std::string& what, std::uint32_t nth) {
                w.device(pe).engine.inject(target, qp, what == "status" ? Injected::status : Injected::drop_completion,
                                           nth);
            },
            py::arg("pe"), py::arg("target"), py::arg("qp"), py::arg("what"), py::arg("nth") = 0)
        .def("set_tail", [](World& w, int pe, int target, std::uint32_t qp, std::uint32_t tail) {
            w.device(pe).engine.queue(target, qp).tail = tail;
        });
}

void bind_core(py::module_& m) {
    py::class_<ScriptBatch, std::shared_ptr<ScriptBatch>>(m, "Batch")
        .def_readwrite("pending_count", &ScriptBatch::pending);
    py::class_<ScriptCore>(m, "ScriptCore", "A vector core driven from Python. Addresses are heap offsets.")
        .def("batch", &ScriptCore::batch, py::arg("scratch_bytes") = 8192)
        .def(
            "post",
            [](ScriptCore& c, const std::string& kind, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes,
               int pe, std::uint32_t qp, const std::string& order, std::uint32_t cqe, const std::string& action,
               const std::string& pipe, std::shared_ptr<ScriptBatch> batch, std::uint64_t signal, std::uint64_t operand,
               std::uint64_t compare, std::uint32_t se, std::uint32_t fence, std::uint32_t sync_id) {
                const Opcode opcode = kind == "put"          ? Opcode::write
                                      : kind == "get"        ? Opcode::read
                                      : kind == "put_signal" ? Opcode::write_notify
                                      : kind == "fetch_add"  ? Opcode::fetch_add
                                                             : Opcode::compare_swap;
                c.post_kind(opcode, dst, src, bytes, pe, qp, order, cqe, action, pipe, batch, signal, operand, compare,
                            se, fence, sync_id);
            },
            py::arg("kind"), py::arg("dst"), py::arg("src") = 0, py::arg("bytes") = 0, py::kw_only(), py::arg("pe"),
            py::arg("qp") = 0, py::arg("order") = "no", py::arg("cqe") = 1, py::arg("action") = "immediate",
            py::arg("pipe") = "mte3", py::arg("batch") = nullptr, py::arg("signal") = 0, py::arg("operand") = 0,
            py::arg("compare") = 0, py::arg("se") = 0, py::arg("fence") = 0, py::arg("sync_id") = 0)
        .def(
            "quiet",
            [](ScriptCore& c, int pe, std::uint32_t qp) {
                CoreScope s(c.core);
                quiet(c.core, pe, qp);
            },
            py::arg("pe"), py::arg("qp") = 0)
        .def(
            "poll", [](ScriptCore& c, int pe, std::uint32_t qp) { return poll_completion(c.core, c.queue(pe, qp)); },
            py::arg("pe"), py::arg("qp") = 0)
        .def("store64",
             [](ScriptCore& c, std::uint64_t offset, std::uint64_t value) {
                 c.core.store(reinterpret_cast<std::uint64_t*>(c.at(offset)), value);
             })
        .def("load64",
             [](ScriptCore& c, std::uint64_t offset) {
                 return c.core.load(reinterpret_cast<const std::uint64_t*>(c.at(offset)));
             })
        .def("flush",
             [](ScriptCore& c, std::uint64_t offset) { c.core.flush_line(reinterpret_cast<void*>(c.at(offset))); })
        .def("wait_until", &ScriptCore::wait_until, py::arg("offset"), py::arg("at_least"),
             py::arg("invalidate") = true)
        .def("store_wqe", &ScriptCore::store_wqe, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::kw_only(),
             py::arg("pe"), py::arg("qp") = 0, py::arg("odr") = 5, py::arg("cqe") = false,
             "Writes one descriptor at the head of the ring and advances the head; neither flushed nor rung.")
        .def("or_order", &ScriptCore::or_order, py::arg("pe"), py::arg("qp"), py::arg("index"), py::arg("odr"),
             py::arg("cqe"), py::arg("clear"))
        .def("flush_wqes", [](ScriptCore& c, int pe, std::uint32_t qp, std::uint32_t first,
                              std::uint32_t end) { flush_blocks(c.core, c.queue(pe, qp), first, end); })
        .def("ring", [](ScriptCore& c, int pe, std::uint32_t qp,
                        std::uint32_t head) { c.device.store_register(head, &c.queue(pe, qp).doorbell_register); })
        .def("ring_completion",
             [](ScriptCore& c, int pe, std::uint32_t qp, std::uint32_t tail) {
                 c.device.store_register(tail, &c.queue(pe, qp).cq_doorbell_register);
             })
        .def("plain_store_to_doorbell",
             [](ScriptCore& c, int pe, std::uint32_t qp, std::uint64_t head) {
                 auto* address = &c.queue(pe, qp).doorbell_register;
                 c.core.store(address, head);
                 c.core.flush_line(address);
             })
        .def("device_store", [](ScriptCore& c, std::uint64_t offset, std::uint64_t value) {
            c.device.store_register(value, reinterpret_cast<void*>(c.at(offset)));
        });
}

}  // namespace

void bind_emulation(py::module_& m) {
    bind_enums(m);
    bind_world(m);
    bind_core(m);
}
