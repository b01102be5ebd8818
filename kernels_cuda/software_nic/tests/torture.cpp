// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, driven through the plug-in's RMA table as NCCL drives it, on the stand-in for GPU memory. A checker
// thread of each rank watches its memory and holds what it sees against the ordering contract:
//   broken:     data covered by a signal was missing or wrong when the signal was seen (never, but with early_signal)
//   the rest:   outcomes that the contract allows, counted to show that they really occur
// Arguments are key=value; the result is one line of JSON. Faults and seed come from HAL_SWNIC_*; `seeds=N` runs N seeds.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "clock.hpp"
#include "nccl_abi.hpp"

using namespace hal::swnic;

extern "C" abi::RmaPluginV14 ncclRmaPlugin_v14;
extern "C" void* hal_swnic_host_allocate(std::size_t bytes);

namespace {

constexpr int most_ranks = 8;
constexpr int trailing = 2;  // relaxed puts after each strong signal

struct Options {
    int ranks = 2, rounds = 6, puts = 12, queues = 2, seeds = 1, gpus = 1;
    std::size_t slot = 2048;        // largest put
    bool host_source = false;       // sources are ordinary memory, as values that a kernel puts inline
    std::string signal = "strong";  // strong, bundled (strong, with the last put), weak, va, va_strict, va_weak
    double seconds = 20;
};

struct Result {
    std::atomic<std::uint64_t> broken, checked, overtook, passed_signal, torn, weak_passed, failed_requests, unfinished;
    std::atomic<Nanos> error_seen;
    std::atomic<int> finished;
};

struct Shared {
    char handles[most_ranks][abi::handle_bytes];
    std::atomic<int> arrived[8];
    std::atomic<int> dead;
    Result results[most_ranks];
};

// Memory of the device under the engine: the stand-in's, or the fake driver's (tests/fake_cuda.cpp).
struct Memory {
    void* (*allocate)(std::size_t);
    void (*adopt)(void*, std::size_t);  // memory that cannot be exported, if the driver must know of it
};

Memory device_memory() {
    const char* device = std::getenv("HAL_SWNIC_DEVICE");
    if (device && std::strcmp(device, "cuda") != 0) return {hal_swnic_host_allocate, [](void*, std::size_t) {}};
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    Memory memory{};
    if (driver) {
        memory.allocate = reinterpret_cast<void* (*)(std::size_t)>(dlsym(driver, "fake_cuda_allocate"));
        memory.adopt = reinterpret_cast<void (*)(void*, std::size_t)>(dlsym(driver, "fake_cuda_adopt"));
        if (auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"))) init(0);
    }
    if (!memory.allocate) {
        std::fprintf(stderr, "libcuda.so.1 is not the fake one\n");
        _exit(2);
    }
    return memory;
}

// As NCCL without NCCL_DEBUG: says nothing. What a person must see comes on stderr.
void logger(abi::LogLevel, unsigned long, const char*, int, const char*, ...) {}

std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// One put: where it goes, how long it is, what it holds. Never a zero byte, so that absence is visible everywhere.
struct Layout {
    const Options& options;
    int per_round() const { return options.puts + trailing; }
    std::size_t slot(int src, int round, int i) const {
        return static_cast<std::size_t>((src * options.rounds + round) * per_round() + i);
    }
    std::size_t data_bytes() const {
        return static_cast<std::size_t>(options.ranks * options.rounds * per_round()) * options.slot;
    }
    std::size_t words() const { return static_cast<std::size_t>(options.ranks * options.rounds * per_round()); }
    std::size_t window_bytes() const { return data_bytes() + words() * 8; }
    std::size_t length(std::size_t slot, int dst) const {
        return 1 + mix(slot * 31 + static_cast<std::size_t>(dst) + 7) % options.slot;
    }
    static unsigned char byte(std::size_t slot, int dst, std::size_t i) {
        return static_cast<unsigned char>(1 + mix(slot * 131 + static_cast<std::size_t>(dst) * 17 + i / 8 + 1) % 255);
    }
    void fill(unsigned char* at, std::size_t slot, int dst) const {
        for (std::size_t i = 0; i < length(slot, dst); ++i) at[i] = byte(slot, dst, i);
    }
    // How many of the bytes are there; a wrong byte counts as broken at once.
    std::size_t present(const volatile unsigned char* window, std::size_t slot, int dst, bool& wrong) const {
        std::size_t count = 0, n = length(slot, dst);
        for (std::size_t i = 0; i < n; ++i) {
            unsigned char seen = window[slot * options.slot + i];
            if (seen == byte(slot, dst, i))
                ++count;
            else if (seen != 0)
                wrong = true;
        }
        return count;
    }
};

class Rank {
  public:
    Rank(const Options& options, Shared& shared, int rank)
        : o_(options), layout_{o_}, shared_(shared), result_(shared.results[rank]), rank_(rank) {}

    void run() {
        connect();
        std::thread checker([this] { check(); });
        post_all();
        finish_requests();
        read_back();
        arrive(2);
        await_checks();
        stop_ = true;
        checker.join();
        close();
        result_.finished = 1;
    }

  private:
    struct Posted {
        void* request;
        unsigned char* source;
        std::size_t bytes;
    };

    void must(abi::Result result, const char* what) {
        if (result == abi::success) return;
        std::fprintf(stderr, "rank %d: %s gave %d\n", rank_, what, result);
        _exit(3);
    }

    // All ranks, or as many as are alive; bounded.
    void arrive(int point) {
        ++shared_.arrived[point];
        Nanos deadline = now_ns() + static_cast<Nanos>(o_.seconds * 1e9);
        while (shared_.arrived[point] + shared_.dead < o_.ranks && now_ns() < deadline) usleep(100);
    }

    void connect() {
        auto& p = ncclRmaPlugin_v14;
        void *ctx, *listening;
        memory_ = device_memory();
        must(p.init(&ctx, 1, logger), "init");
        must(p.listen(ctx, 0, shared_.handles[rank_], &listening), "listen");
        arrive(0);
        std::vector<void*> handles;
        for (int i = 0; i < o_.ranks; ++i) handles.push_back(shared_.handles[i]);
        must(p.connect(ctx, handles.data(), o_.ranks, rank_, listening, &comm_), "connect");
        must(p.close_listen(listening), "closeListen");
        window_ = static_cast<unsigned char*>(memory_.allocate(layout_.window_bytes()));
        std::size_t source_bytes = layout_.data_bytes() * static_cast<std::size_t>(o_.ranks);
        source_ =
            static_cast<unsigned char*>(o_.host_source ? std::calloc(source_bytes, 1) : memory_.allocate(source_bytes));
        signals_.assign(layout_.words(), 0);
        memory_.adopt(signals_.data(), signals_.size() * 8);
        auto cuda = abi::ptr_cuda;
        std::uint64_t window_flags = va() && o_.signal != "va" ? abi::mr_force_strict_order : 0;
        must(p.reg_mr(comm_, window_, layout_.window_bytes(), cuda, window_flags, &window_mr_), "regMrSym window");
        must(p.reg_mr(comm_, source_, source_bytes, o_.host_source ? abi::ptr_host : cuda, 0, &source_mr_),
             "regMrSym source");
        must(p.reg_mr(comm_, signals_.data(), signals_.size() * 8, cuda,
                      abi::mr_force_strict_order | abi::mr_signal_never_reset, &signal_mr_),
             "regMrSym signals");
        abi::RmaConfigV14 config{o_.queues, -1, 1};
        must(p.create_context(comm_, &config, &queues_), "createContext");
        arrive(1);
    }

    bool va() const { return o_.signal.starts_with("va"); }
    bool weak() const { return o_.signal == "weak"; }
    // The strong signal's word counts the rounds of one (source, queue).
    std::size_t word_offset(int src, int queue) const {
        return (va() ? layout_.data_bytes() : 0) + static_cast<std::size_t>(src * o_.queues + queue) * 8;
    }
    std::uint64_t read_word(std::size_t word) const {
        auto* base = va() ? reinterpret_cast<std::uint64_t*>(window_ + layout_.data_bytes())
                          : const_cast<std::uint64_t*>(signals_.data());
        return std::atomic_ref(base[word]).load(std::memory_order_acquire);
    }

    void put(int round, int i, int peer, bool with_signal) {
        auto& p = ncclRmaPlugin_v14;
        std::size_t slot = layout_.slot(rank_, round, i), bytes = layout_.length(slot, peer);
        unsigned char* from = source_ + static_cast<std::size_t>(peer) * layout_.data_bytes() + slot * o_.slot;
        layout_.fill(from, slot, peer);
        void* request = nullptr;
        int queue = round % o_.queues;
        auto src_off = static_cast<std::uint64_t>(from - source_);
        auto peer_rank = static_cast<std::uint32_t>(peer);
        if (weak())
            note(p.iput_signal(queues_, queue, src_off, source_mr_, bytes, slot * o_.slot, window_mr_, peer_rank,
                               slot * 8, signal_mr_, 1, abi::signal_add, false, &request));
        else if (with_signal)
            note(p.iput_signal(queues_, queue, src_off, source_mr_, bytes, slot * o_.slot, window_mr_, peer_rank,
                               word_offset(rank_, queue), va() ? window_mr_ : signal_mr_, 0, abi::signal_inc, true,
                               &request));
        else
            note(p.iput(queues_, queue, src_off, source_mr_, bytes, slot * o_.slot, window_mr_, peer_rank, &request));
        posted_.push_back({request, from, bytes});
    }

    void post_all() {
        auto& p = ncclRmaPlugin_v14;
        for (int round = 0; round < o_.rounds && !error_; ++round) {
            for (int step = 0; step < o_.ranks; ++step) {
                int peer = (rank_ + step) % o_.ranks;
                bool bundled = o_.signal == "bundled";
                for (int i = 0; i < o_.puts; ++i) put(round, i, peer, bundled && i == o_.puts - 1);
                if (!weak() && !bundled) {
                    void* request = nullptr;
                    int queue = round % o_.queues;
                    note(p.iput_signal(queues_, queue, 0, nullptr, 0, 0, nullptr, static_cast<std::uint32_t>(peer),
                                       word_offset(rank_, queue), va() ? window_mr_ : signal_mr_, 1, abi::signal_add,
                                       o_.signal != "va_weak", &request));
                    posted_.push_back({request, nullptr, 0});
                }
                for (int i = 0; i < trailing; ++i) put(round, o_.puts + i, peer, false);
                poll_requests();
            }
        }
    }

    // Completed requests say nothing of the target: the last signals may still be on their way to the checker.
    void await_checks() {
        auto each = static_cast<std::uint64_t>(o_.ranks * o_.rounds * (weak() ? layout_.per_round() : o_.puts));
        bool whole = !shared_.dead;
        for (int i = 0; i < o_.ranks; ++i)
            whole = whole && !shared_.results[i].failed_requests && shared_.results[i].unfinished == 0;
        Nanos deadline = now_ns() + static_cast<Nanos>((whole ? o_.seconds : 0.3) * 1e9);
        while (result_.checked < each && now_ns() < deadline) usleep(100);
        arrive(3);
    }

    void note(abi::Result result) {
        if (result != abi::success) error_ = true;
    }

    // As NCCL does; a source whose request is done is overwritten at once.
    void poll_requests() {
        bool lost = false;
        for (auto& one : posted_) {
            if (!one.request) continue;
            int done = 0;
            if (ncclRmaPlugin_v14.test(comm_, one.request, &done) != abi::success) {
                ++result_.failed_requests;
                lost = true;
                one.request = nullptr;
            } else if (done) {
                if (one.source) std::memset(one.source, 0xEE, one.bytes);
                one.request = nullptr;
            }
        }
        std::erase_if(posted_, [](const Posted& one) { return !one.request; });
        if (lost) {
            Nanos unseen = 0;
            result_.error_seen.compare_exchange_strong(unseen, now_ns());
        }
    }

    void finish_requests() {
        Nanos deadline = now_ns() + static_cast<Nanos>(o_.seconds * 1e9);
        while (!posted_.empty() && now_ns() < deadline) {
            poll_requests();
            usleep(50);
        }
        result_.unfinished = posted_.size();
    }

    // A get of what this rank's own data became on the next rank.
    void read_back() {
        if (!posted_.empty() || result_.failed_requests || shared_.dead || weak()) return;
        auto peer = static_cast<std::uint32_t>((rank_ + 1) % o_.ranks);
        std::size_t slot = layout_.slot(rank_, o_.rounds - 1, 0), bytes = layout_.length(slot, static_cast<int>(peer));
        void* request = nullptr;
        int done = 0;
        Nanos deadline = now_ns() + static_cast<Nanos>(o_.seconds * 1e9);
        do {  // the put may still be held after its request: relaxed data has no other end than a later signal
            must(ncclRmaPlugin_v14.iget(queues_, 0, slot * o_.slot, window_mr_, bytes, 0, source_mr_, peer, &request),
                 "iget");
            for (done = 0; !done && now_ns() < deadline;)
                must(ncclRmaPlugin_v14.test(comm_, request, &done), "test of iget");
            std::size_t count = 0;
            for (std::size_t i = 0; i < bytes; ++i)
                count += source_[i] == Layout::byte(slot, static_cast<int>(peer), i);
            if (count == bytes) return;
        } while (now_ns() < deadline);
        ++result_.broken;
    }

    bool complete(int src, int round, int i) {
        bool wrong = false;
        std::size_t slot = layout_.slot(src, round, i);
        bool whole = layout_.present(window_, slot, rank_, wrong) == layout_.length(slot, rank_);
        if (wrong) ++result_.broken;
        return whole;
    }

    void check() {
        std::vector<std::uint64_t> seen(static_cast<std::size_t>(o_.ranks * o_.queues), 0);
        std::vector<bool> weak_seen(layout_.words(), false);
        while (!stop_) {
            for (int src = 0; src < o_.ranks; ++src) {
                if (weak())
                    check_weak(src, weak_seen);
                else
                    check_strong(src, seen);
            }
            std::this_thread::yield();
        }
    }

    void check_strong(int src, std::vector<std::uint64_t>& seen) {
        for (int queue = 0; queue < o_.queues; ++queue) {
            auto word = static_cast<std::size_t>(src * o_.queues + queue);
            std::uint64_t value = read_word(word);
            for (; seen[word] < value; ++seen[word]) {
                int round = static_cast<int>(seen[word]) * o_.queues + queue;
                for (int i = 0; i < o_.puts; ++i) {
                    ++result_.checked;
                    if (!complete(src, round, i)) ++result_.broken;
                }
            }
            int next = static_cast<int>(seen[word]) * o_.queues + queue;
            if (next < o_.rounds) watch_round(src, next, word, seen[word]);
        }
    }

    // Before the signal: what of the round is already there, and in which order. The later one is read first, so what
    // is counted was really out of order.
    void watch_round(int src, int round, std::size_t word, std::uint64_t before) {
        if (complete(src, round, o_.puts) && read_word(word) == before) ++result_.passed_signal;
        for (int i = o_.puts - 1; i > 0; --i) {
            if (!complete(src, round, i)) continue;
            if (!complete(src, round, i - 1)) ++result_.overtook;
            break;
        }
        bool wrong = false;
        std::size_t slot = layout_.slot(src, round, 0), count = layout_.present(window_, slot, rank_, wrong);
        if (count > 0 && count < layout_.length(slot, rank_) && layout_.length(slot, rank_) > 64) ++result_.torn;
    }

    void check_weak(int src, std::vector<bool>& seen) {
        for (int round = 0; round < o_.rounds; ++round)
            for (int i = 0; i < layout_.per_round(); ++i) {
                std::size_t slot = layout_.slot(src, round, i);
                if (seen[slot] || read_word(slot) == 0) continue;
                seen[slot] = true;
                ++result_.checked;
                if (!complete(src, round, i)) ++result_.broken;
                if (i > 0 && !complete(src, round, i - 1)) ++result_.weak_passed;
            }
    }

    void close() {
        auto& p = ncclRmaPlugin_v14;
        must(p.destroy_context(queues_), "destroyContext");
        for (void* mr : {signal_mr_, source_mr_, window_mr_}) must(p.dereg_mr(comm_, mr), "deregMrSym");
        must(p.close_coll(comm_), "closeColl");
        must(p.finalize(nullptr), "finalize");
    }

    const Options& o_;
    Layout layout_;
    Memory memory_{};
    Shared& shared_;
    Result& result_;
    int rank_;
    void *comm_ = nullptr, *queues_ = nullptr, *window_mr_ = nullptr, *source_mr_ = nullptr, *signal_mr_ = nullptr;
    unsigned char *window_ = nullptr, *source_ = nullptr;
    std::vector<std::uint64_t> signals_;
    std::vector<Posted> posted_;
    std::atomic<bool> stop_{false};
    bool error_ = false;
};

struct Outcome {
    std::map<std::string, std::uint64_t> counts;
    std::vector<std::string> notes;
};

void run_seed(const Options& options, std::uint64_t seed, Outcome& outcome) {
    auto* shared =
        static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    setenv("HAL_SWNIC_SEED", std::to_string(seed).c_str(), 1);
    std::map<pid_t, int> children;
    for (int rank = 0; rank < options.ranks; ++rank) {
        pid_t child = fork();
        if (child == 0) {
            setenv("FAKE_CUDA_DEVICE", std::to_string(rank % options.gpus).c_str(), 1);
            Rank(options, *shared, rank).run();
            std::_Exit(0);
        }
        children[child] = rank;
    }
    Nanos death = 0;
    while (!children.empty()) {
        int status = 0;
        pid_t child = wait(&status);
        int rank = children[child];
        children.erase(child);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
        if (!death) death = now_ns();
        ++shared->dead;
        ++outcome.counts[WIFSIGNALED(status) ? "killed" : "crashed"];
        outcome.notes.push_back("rank " + std::to_string(rank) +
                                (WIFSIGNALED(status) ? " signal " + std::to_string(WTERMSIG(status))
                                                     : " exit " + std::to_string(WEXITSTATUS(status))));
    }
    for (int rank = 0; rank < options.ranks; ++rank) {
        Result& r = shared->results[rank];
        outcome.counts["broken"] += r.broken, outcome.counts["checked"] += r.checked;
        outcome.counts["overtook"] += r.overtook, outcome.counts["passed_signal"] += r.passed_signal;
        outcome.counts["torn"] += r.torn, outcome.counts["weak_passed"] += r.weak_passed;
        outcome.counts["failed_requests"] += r.failed_requests, outcome.counts["unfinished"] += r.unfinished;
        outcome.counts["finished"] += static_cast<std::uint64_t>(r.finished.load());
        outcome.counts["seeds_broken"] += 0;
        if (death && r.error_seen) {
            auto late = static_cast<std::uint64_t>(std::max<Nanos>(r.error_seen - death, 0) / 1000);
            outcome.counts["noticed"] += 1;
            outcome.counts["noticed_after_us"] = std::max(outcome.counts["noticed_after_us"], late);
        }
    }
    bool broken = std::any_of(shared->results, shared->results + options.ranks, [](Result& r) { return r.broken > 0; });
    outcome.counts["seeds_broken"] += broken;
    munmap(shared, sizeof(Shared));
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    for (int i = 1; i < argc; ++i) {
        std::string text = argv[i], key = text.substr(0, text.find('=')), value = text.substr(text.find('=') + 1);
        if (key == "ranks")
            options.ranks = std::stoi(value);
        else if (key == "rounds")
            options.rounds = std::stoi(value);
        else if (key == "puts")
            options.puts = std::stoi(value);
        else if (key == "queues")
            options.queues = std::stoi(value);
        else if (key == "gpus")
            options.gpus = std::stoi(value);
        else if (key == "slot")
            options.slot = std::stoull(value) / 8 * 8;
        else if (key == "source")
            options.host_source = value == "host";
        else if (key == "seeds")
            options.seeds = std::stoi(value);
        else if (key == "signal")
            options.signal = value;
        else if (key == "seconds")
            options.seconds = std::stod(value);
        else
            return std::fprintf(stderr, "no option %s\n", key.c_str()), 2;
    }
    if (options.ranks < 1 || options.ranks > most_ranks) return std::fprintf(stderr, "1 to 8 ranks\n"), 2;
    const char* first = std::getenv("HAL_SWNIC_SEED");
    std::uint64_t seed = first ? std::strtoull(first, nullptr, 10) : 0;
    Outcome outcome;
    for (int i = 0; i < options.seeds; ++i) run_seed(options, seed + static_cast<std::uint64_t>(i), outcome);
    std::printf("{\"seeds\": %d, \"ranks\": %d", options.seeds, options.ranks);
    for (auto& [name, count] : outcome.counts)
        std::printf(", \"%s\": %llu", name.c_str(), static_cast<unsigned long long>(count));
    std::printf(", \"notes\": \"");
    for (auto& note : outcome.notes) std::printf("%s; ", note.c_str());
    std::printf("\"}\n");
    return 0;
}
