// SPDX-License-Identifier: Apache-2.0
// One vector core: its scalar data cache, its copy pipes and its scratch (UB). In a lazy device stores stay in the cache
// until they are flushed, loads may be stale until invalidated, and copies happen at the wait that needs them, so that a
// forgotten flush or wait shows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

namespace hal::udma {

class Device;

enum class Pipe : std::uint8_t { scalar, vector, mte2, mte3, all };

inline constexpr std::uint32_t kScratchBytes = 248 * 1024;
inline constexpr std::uint64_t kLine = 64;

// A strided copy: `rows` pieces of `bytes`, with strides from start to start.
struct Copy {
    std::byte* dst;
    const std::byte* src;
    std::uint32_t rows, bytes;
    std::uint64_t dst_stride, src_stride;
};

// What defer remembers of an open batch (rule 22).
struct Batch {
    int pe;
    std::uint32_t qp, sync_id;
    std::uint8_t opcode;
    const void* scratch;
};

class Core {
  public:
    Core(Device& device, int block, int blocks);
    static Core& current();

    template <class T>
    T load(const T* address) {
        T value;
        load_bytes(reinterpret_cast<std::uint64_t>(address), &value, sizeof(T));
        return value;
    }
    template <class T>
    void store(T* address, T value) {
        store_bytes(reinterpret_cast<std::uint64_t>(address), &value, sizeof(T));
    }
    void flush_line(const void* address);  // clean and invalidate
    void flush_all();

    void copy(Pipe pipe, const Copy& copy);
    void set_flag(int event, int id, Pipe source);
    void wait_flag(int event, int id, Pipe source, Pipe sink);
    void pipe_barrier(Pipe pipe);

    std::byte* allocate_scratch(std::uint32_t bytes);
    void release_scratch() {
        scratch_used_ = 0;
        scratch_ends_.clear();
    }
    std::uint64_t scratch_behind(const void* pointer) const;  // bytes from here to the end of its allocation

    // A turn of a wait that has not seen what it waits for.
    void pause();
    // A place where others may run first.
    void point();

    Device& device;
    const int block, blocks;
    std::unordered_map<const void*, Batch> batches;
    struct Awaited {
        std::uint64_t address = 0, at_least = 0;  // address 0: waits for no signal
        int source = -1, queue = 0, stage = 0;
    } awaited;

  private:
    struct Line {
        std::byte bytes[kLine];
        std::uint64_t dirty = 0;
    };
    void load_bytes(std::uint64_t address, void* out, std::uint32_t bytes);
    void store_bytes(std::uint64_t address, const void* value, std::uint32_t bytes);
    Line& line(std::uint64_t base);
    void write_back(std::uint64_t base, Line& line);
    void run_copies(Pipe pipe, std::uint64_t up_to);
    void perform(const Copy& copy);

    std::map<std::uint64_t, Line> cache_;
    struct PipeState {
        std::deque<Copy> pending;
        std::uint64_t issued = 0, performed = 0;
    };
    PipeState pipes_[2];  // mte2, mte3
    std::map<std::pair<int, int>, std::deque<std::uint64_t>> flags_;
    std::vector<std::byte> scratch_;
    std::uint32_t scratch_used_ = 0;
    std::vector<std::uint32_t> scratch_ends_;
};

}  // namespace hal::udma
