// SPDX-License-Identifier: Apache-2.0
#include "checker/litmus_subject.hpp"

#include <cstring>

#include "checker/check_fabric.hpp"
#include "checker/litmus_machine.hpp"

namespace hal::checker {
namespace {

constexpr std::size_t word_bytes = 8;

}  // namespace

LitmusSubject::LitmusSubject(const LitmusSource& source, const Profile& profile, const Faults& faults)
    : compiled_(compile(source, profile)), faults_(faults), threads_(std::size_t(source.threads)) {
    for (const Instruction& in : source.code) threads_[std::size_t(in.thread)].push_back(in);
}

WorldConfig LitmusSubject::start() {
    const LitmusSource& s = compiled_.source;
    registers_.assign(std::size_t(s.registers), 0);
    constants_.clear();
    WorldConfig c;
    c.profile = compiled_.profile;
    c.ranks = s.ranks;
    c.window_bytes = std::size_t(s.words) * word_bytes;
    c.piece_bytes = word_bytes;
    c.faults = faults_;
    for (const auto& code : threads_) {
        c.thread_rank.push_back(code.empty() ? 0 : code.front().rank);
        for (const Instruction& in : code) c.queues = std::max(c.queues, in.queue + 1);
    }
    c.body = [this](int thread, CheckFabric& fabric) { run_thread(thread, fabric); };
    return c;
}

void LitmusSubject::run_thread(int thread, CheckFabric& f) {
    int barriers = 0;
    const auto at = [](int word) { return std::size_t(word) * word_bytes; };
    for (const Instruction& in : threads_[std::size_t(thread)]) {
        switch (in.what) {
            case Do::put: {
                const void* src = nullptr;
                if (in.src >= 0) {
                    src = f.write(at(in.src), 0);
                } else {
                    const std::uint64_t v =
                        in.value_register >= 0 ? registers_[std::size_t(in.value_register)] : std::uint64_t(in.value);
                    src = constants_.emplace_back(std::size_t(in.count), v).data();
                }
                const std::size_t bytes = std::size_t(in.count) * word_bytes;
                if (in.slot < 0)
                    f.put(in.queue, in.peer, at(in.dst), src, bytes, in.order);
                else
                    f.put_with_signal(in.queue, in.peer, at(in.dst), src, bytes, in.order, at(in.slot),
                                      std::uint64_t(in.signal_value), in.signal_op, in.signal_order);
                break;
            }
            case Do::signal:
                f.signal(in.queue, in.peer, at(in.slot), std::uint64_t(in.signal_value), in.signal_op, in.order);
                break;
            case Do::wait:
                f.wait(at(in.dst), std::uint64_t(in.at_least), -1, 0, "wait");
                break;
            case Do::quiet:
                f.quiet(in.queue, in.peer, in.remote ? QuietScope::remote : QuietScope::source);
                break;
            case Do::read:
                std::memcpy(&registers_[std::size_t(in.reg)], f.read(at(in.dst), word_bytes), word_bytes);
                break;
            case Do::write: {
                const std::uint64_t v =
                    in.value_register >= 0 ? registers_[std::size_t(in.value_register)] : std::uint64_t(in.value);
                std::memcpy(f.write(at(in.dst), word_bytes), &v, word_bytes);
                break;
            }
            case Do::arrive:
                f.arrive();
                break;
            case Do::pass:
                f.pass(++barriers * compiled_.source.barrier_threads);
                break;
        }
    }
}

std::vector<std::uint8_t> LitmusSubject::outcome(const World& world) {
    std::vector<std::uint8_t> o;
    for (const std::uint64_t r : registers_) o.push_back(std::uint8_t(r));
    for (int r = 0; r < compiled_.source.ranks; ++r)
        for (int w = 0; w < compiled_.source.words; ++w)
            o.push_back(std::uint8_t(std::to_integer<int>(world.window(r)[std::size_t(w) * word_bytes])));
    o.push_back(!world.all_ended());
    return o;
}

std::string LitmusSubject::judge(const World& world) {
    LitmusState s;
    const std::vector<std::uint8_t> o = outcome(world);
    std::memcpy(s.registers, o.data(), registers_.size());
    std::memcpy(s.memory, o.data() + registers_.size(), o.size() - registers_.size() - 1);
    return LitmusMachine(compiled_).bad(s, !world.all_ended()) ? "the bad outcome was reached" : "";
}

}  // namespace hal::checker
