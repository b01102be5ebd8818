// SPDX-License-Identifier: Apache-2.0
// GPU memory through the CUDA driver. Three rules keep it moving under a kernel that fills the GPU and spins on this
// very NIC: copies between GPUs go by the peer copy engine; copies within one GPU are staged through pinned host memory,
// since the driver may give a direct one to the busy multiprocessors, where it waits for ever; and completion is a word
// that the stream writes to pinned memory, never an event. All pinned memory is allocated with the lane, because
// allocating may wait for running kernels.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "clock.hpp"
#include "cuda_abi.hpp"
#include "device.hpp"
#include "log.hpp"

namespace hal::swnic {
namespace cuda {

const Driver& driver() {
    static const Driver loaded = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!library)
            throw DeviceError(
                "libcuda.so.1 cannot be loaded: no NVIDIA driver here (HAL_SWNIC_DEVICE=host needs none)");
        Driver d;
#define HAL_SWNIC_LOAD(name, ...)                                              \
    if (!(d.name = reinterpret_cast<decltype(d.name)>(dlsym(library, #name)))) \
        throw DeviceError("the NVIDIA driver has no " #name "; a driver for CUDA 12 or newer is needed");
        HAL_SWNIC_CUDA_FUNCTIONS(HAL_SWNIC_LOAD)
#undef HAL_SWNIC_LOAD
        return d;
    }();
    return loaded;
}

}  // namespace cuda

namespace {

using cuda::driver;

constexpr std::size_t stage_bytes = 2u << 20;  // one staged copy moves in steps of this
constexpr std::size_t inline_bytes = 64u << 10;

void check(cuda::Status status, const char* what) {
    if (status == 0) return;
    const char* name = nullptr;
    driver().cuGetErrorName(status, &name);
    throw DeviceError(std::string(what) + ": " + (name ? name : std::to_string(status)));
}

// Makes the context current for the scope: NCCL calls from threads of its own.
class Current {
  public:
    explicit Current(cuda::Context context) {
        check(driver().cuCtxGetCurrent(&before_), "cuCtxGetCurrent");
        check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent");
    }
    ~Current() { driver().cuCtxSetCurrent(before_); }

  private:
    cuda::Context before_ = nullptr;
};

cuda::Stream make_stream() {
    int least = 0, greatest = 0;
    check(driver().cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
    cuda::Stream stream;
    check(driver().cuStreamCreateWithPriority(&stream, cuda::stream_non_blocking, greatest),
          "cuStreamCreateWithPriority");
    return stream;
}

// Space handed out in order and given back in any order: freed from the front.
class Arena {
  public:
    void reset(std::byte* base, std::size_t bytes) { base_ = base, size_ = bytes; }
    bool contains(Address address) const {
        auto base = reinterpret_cast<Address>(base_);
        return address >= base && address < base + size_;
    }

    std::byte* take(std::size_t bytes) {
        bytes = (std::max<std::size_t>(bytes, 1) + 15) / 16 * 16;
        std::size_t head = blocks_.empty() ? 0 : blocks_.back().end;
        std::size_t tail = blocks_.empty() ? 0 : blocks_.front().begin;
        bool wrapped = !blocks_.empty() && head <= tail;
        if (!wrapped && head + bytes > size_) head = 0, wrapped = !blocks_.empty();
        if (head + bytes > (wrapped ? tail : size_)) return nullptr;
        blocks_.push_back({head, head + bytes, false});
        return base_ + head;
    }

    void give(const std::byte* block) {
        auto offset = static_cast<std::size_t>(block - base_);
        for (Block& one : blocks_)
            if (one.begin == offset && !one.free) {
                one.free = true;
                break;
            }
        while (!blocks_.empty() && blocks_.front().free) blocks_.pop_front();
    }

  private:
    struct Block {
        std::size_t begin, end;
        bool free;
    };
    std::byte* base_ = nullptr;
    std::size_t size_ = 0;
    std::deque<Block> blocks_;
};

// A stream and its pinned memory. Lanes that end leave theirs to the next one: freeing pinned memory waits for the whole
// device, and a kernel on it may be waiting for this very thread.
struct LaneResources {
    cuda::Stream stream = nullptr;
    std::byte* pinned = nullptr;  // the counter, the stage, inlines, bounces
    cuda::Pointer counter_on_device = 0;
    std::size_t bounce_bytes = 0;
};

class LanePool {
  public:
    LaneResources take(std::size_t bounce_bytes) {
        {
            std::lock_guard lock(mutex_);
            for (auto one = free_.begin(); one != free_.end(); ++one) {
                if (one->bounce_bytes != bounce_bytes) continue;
                LaneResources found = *one;
                free_.erase(one);
                return found;
            }
        }
        LaneResources made;
        made.stream = make_stream();
        made.bounce_bytes = bounce_bytes;
        void* pinned = nullptr;
        check(
            driver().cuMemHostAlloc(&pinned, 64 + stage_bytes + inline_bytes + bounce_bytes, cuda::host_alloc_portable),
            "pinned memory for a queue");
        made.pinned = static_cast<std::byte*>(pinned);
        check(driver().cuMemHostGetDevicePointer_v2(&made.counter_on_device, pinned, 0), "cuMemHostGetDevicePointer");
        return made;
    }

    void give(const LaneResources& resources) {
        std::lock_guard lock(mutex_);
        free_.push_back(resources);
    }

  private:
    std::mutex mutex_;
    std::vector<LaneResources> free_;
};

class CudaLane final : public Lane {
  public:
    CudaLane(LanePool& pool, LaneResources resources, CopyRoute route)
        : pool_(pool), resources_(resources), stream_(resources.stream), route_(route) {
        std::memset(resources_.pinned, 0, 64);
        stage_ = resources_.pinned + 64;
        inlines_.reset(stage_ + stage_bytes, inline_bytes);
        bounces_.reset(stage_ + stage_bytes + inline_bytes, resources_.bounce_bytes);
    }

    ~CudaLane() override {
        Nanos deadline = now_ns() + 2'000'000'000;
        while (driver().cuStreamQuery(stream_) != 0)
            if (now_ns() > deadline) {
                warn("a copy stream does not end; its pinned memory is not used again");
                return;
            }
        pool_.give(resources_);
    }

    std::size_t submit(std::span<const Copy> copies) override {
        std::size_t taken = 0;
        while (taken < copies.size() && start(copies[taken])) ++taken;
        if (taken)
            check(driver().cuStreamWriteValue64_v2(stream_, resources_.counter_on_device, ++submitted_,
                                                   cuda::write_value_default),
                  "cuStreamWriteValue64");
        return taken;
    }

    std::uint64_t completed() override {
        auto done =
            std::atomic_ref(*reinterpret_cast<std::uint64_t*>(resources_.pinned)).load(std::memory_order_acquire);
        for (; !inlined_.empty() && inlined_.front().ticket <= done; inlined_.pop_front())
            inlines_.give(inlined_.front().block);
        return done;
    }

    std::byte* take_bounce(std::size_t bytes) override { return bounces_.take(bytes); }
    void give_bounce(std::byte* bounce) override { bounces_.give(bounce); }

  private:
    struct Inlined {
        std::uint64_t ticket;
        std::byte* block;
    };

    // False: no room now, nothing was started.
    bool start(const Copy& copy) {
        auto* from = reinterpret_cast<std::byte*>(copy.src);
        auto* to = reinterpret_cast<std::byte*>(copy.dst);
        if (copy.src_host && copy.dst_host) {
            std::memcpy(to, from, copy.bytes);
        } else if (copy.src_host) {
            return start_from_host(copy, from);
        } else if (copy.dst_host) {
            check(driver().cuMemcpyDtoHAsync_v2(to, copy.src, copy.bytes, stream_), "cuMemcpyDtoHAsync");
        } else if (route_ == CopyRoute::stage || (route_ == CopyRoute::automatic && copy.same_device)) {
            start_staged(copy);
        } else {
            check(driver().cuMemcpyAsync(copy.dst, copy.src, copy.bytes, stream_), "cuMemcpyAsync");
        }
        return true;
    }

    // Values that a kernel put inline lie in ordinary memory: copied to pinned memory now, so that the copy is not
    // synchronous and the source is free at once. Large ones the driver stages itself.
    bool start_from_host(const Copy& copy, std::byte* from) {
        if (!bounces_.contains(copy.src) && copy.bytes <= inline_bytes / 4) {
            std::byte* block = inlines_.take(copy.bytes);
            if (!block) return false;
            std::memcpy(block, from, copy.bytes);
            inlined_.push_back({submitted_ + 1, block});
            from = block;
        }
        check(driver().cuMemcpyHtoDAsync_v2(copy.dst, from, copy.bytes, stream_), "cuMemcpyHtoDAsync");
        return true;
    }

    // The stream orders the two halves and the reuse of the one buffer.
    void start_staged(const Copy& copy) {
        for (std::size_t offset = 0; offset < copy.bytes; offset += stage_bytes) {
            std::size_t bytes = std::min(stage_bytes, copy.bytes - offset);
            check(driver().cuMemcpyDtoHAsync_v2(stage_, copy.src + offset, bytes, stream_),
                  "staging: cuMemcpyDtoHAsync");
            check(driver().cuMemcpyHtoDAsync_v2(copy.dst + offset, stage_, bytes, stream_),
                  "staging: cuMemcpyHtoDAsync");
        }
    }

    LanePool& pool_;
    const LaneResources resources_;
    const cuda::Stream stream_;
    const CopyRoute route_;
    std::byte* stage_;
    std::uint64_t submitted_ = 0;
    Arena inlines_, bounces_;
    std::deque<Inlined> inlined_;
};

class CudaDevice final : public Device {
  public:
    CudaDevice(cuda::Context context, CopyRoute route) : context_(context), route_(route) {
        Current current(context_);
        check(driver().cuCtxGetDevice(&ordinal_), "cuCtxGetDevice");
        cuda::Uuid uuid;
        check(driver().cuDeviceGetUuid_v2(&uuid, ordinal_), "cuDeviceGetUuid");
        std::memcpy(id_.data(), uuid.bytes, id_.size());
        name_ = "CUDA device " + std::to_string(ordinal_);
        signals_ = make_stream();
        void* word = nullptr;
        check(driver().cuMemHostAlloc(&word, 64, cuda::host_alloc_portable), "pinned memory for signals");
        word_ = static_cast<std::uint64_t*>(word);
    }

    const char* name() const override { return name_.c_str(); }
    DeviceId id() const override { return id_; }
    void bind_thread() override { check(driver().cuCtxSetCurrent(context_), "cuCtxSetCurrent"); }
    std::unique_ptr<Lane> make_lane(std::size_t bounce_bytes) override {
        Current current(context_);
        return std::make_unique<CudaLane>(pool_, pool_.take(bounce_bytes), route_);
    }

    std::optional<Exported> export_allocation(Address address) override {
        Current current(context_);
        cuda::Pointer base = 0;
        std::size_t bytes = 0;
        check(driver().cuMemGetAddressRange_v2(&base, &bytes, address), "the memory's allocation");
        cuda::AllocationHandle handle;
        if (driver().cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)) != 0) return std::nullopt;
        int fd = -1;
        // Refused for memory made without an exportable handle type, as NCCL makes its own signals.
        auto status = driver().cuMemExportToShareableHandle(&fd, handle, cuda::handle_posix_fd, 0);
        driver().cuMemRelease(handle);
        if (status != 0) return std::nullopt;
        return Exported{fd, base, bytes};
    }

    Address import_allocation(int fd, std::size_t bytes) override {
        Current current(context_);
        cuda::AllocationHandle handle;
        check(driver().cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                                      cuda::handle_posix_fd),
              "importing a peer's memory");
        cuda::Pointer base = 0;
        try {
            check(driver().cuMemAddressReserve(&base, bytes, 0, 0, 0), "address space for a peer's memory");
            check(driver().cuMemMap(base, bytes, 0, handle, 0), "mapping a peer's memory");
            cuda::AccessDescription access{{cuda::location_device, ordinal_}, cuda::access_read_write};
            check(driver().cuMemSetAccess(base, bytes, &access, 1),
                  "access to a peer's memory: do the GPUs reach each other?");
        } catch (...) {
            driver().cuMemRelease(handle);
            if (base) {
                driver().cuMemUnmap(base, bytes);
                driver().cuMemAddressFree(base, bytes);
            }
            throw;
        }
        driver().cuMemRelease(handle);  // the mapping keeps the memory
        return base;
    }

    void unmap(Address base, std::size_t bytes) override {
        driver().cuMemUnmap(base, bytes);
        driver().cuMemAddressFree(base, bytes);
    }

    void write64(Address word, std::uint64_t value) override {
        std::lock_guard lock(signal_mutex_);
        write_word(word, value);
    }

    void add64(Address word, std::uint64_t value) override {
        std::lock_guard lock(signal_mutex_);
        check(driver().cuMemcpyDtoHAsync_v2(word_, word, sizeof *word_, signals_), "reading a signal");
        check(driver().cuStreamSynchronize(signals_), "reading a signal");
        write_word(word, *word_ + value);
    }

  private:
    void write_word(Address word, std::uint64_t value) {
        check(driver().cuStreamWriteValue64_v2(signals_, word, value, cuda::write_value_default), "raising a signal");
    }

    cuda::Context context_;
    CopyRoute route_;
    cuda::DeviceOrdinal ordinal_ = 0;
    DeviceId id_{};
    std::string name_;
    LanePool pool_;
    std::mutex signal_mutex_;  // connections of one process share the stream
    cuda::Stream signals_ = nullptr;
    std::uint64_t* word_ = nullptr;
};

}  // namespace

std::shared_ptr<Device> cuda_device(CopyRoute route) {
    check(driver().cuInit(0), "cuInit");
    cuda::Context context = nullptr;
    check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    if (!context)
        throw DeviceError("the thread has no current CUDA context; call cudaSetDevice before making the communicator");
    // Never destroyed: at exit the driver may already be gone.
    static std::mutex mutex;
    static auto& devices = *new std::map<cuda::Context, std::shared_ptr<Device>>;
    std::lock_guard lock(mutex);
    auto& device = devices[context];
    if (!device) device = std::make_shared<CudaDevice>(context, route);
    return device;
}

}  // namespace hal::swnic
