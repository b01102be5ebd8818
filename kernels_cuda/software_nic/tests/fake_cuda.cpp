// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU (libcuda.so.1 for tests): the functions that the NIC uses, over shared memory, so that
// device_cuda.cpp itself runs in the torture test. Device memory is a memfd whose name carries the GPU that owns it
// (FAKE_CUDA_DEVICE of the allocating process). Streams run later, on a thread of their own. What would hang or fail on a
// real GPU ends the process: a direct copy within one GPU, pinned memory freed, a call without a current context.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda_abi.hpp"

namespace cuda = hal::swnic::cuda;
using cuda::Pointer;
using cuda::Status;

namespace {

constexpr Status invalid_value = 1, not_supported = 801, not_ready = 600;

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "fake CUDA: %s\n", what);
    std::abort();
}

struct FakeStream {
    std::deque<std::function<void()>> work;
    bool running = false;
};

struct Range {
    std::size_t bytes;
    int fd;      // -1: reserved and not mapped
    int device;  // that owns the memory
};

struct Driver {
    std::mutex mutex;
    std::condition_variable wakes;
    std::vector<FakeStream*> streams;
    std::map<Pointer, Range> ranges;
    std::map<Pointer, std::size_t> pinned;
    std::thread gpu;
};

// Never destroyed: its thread runs until the process ends.
Driver& driver() {
    static auto& instance = *new Driver;
    return instance;
}

thread_local cuda::Context current = nullptr;
int own_device() {
    const char* device = std::getenv("FAKE_CUDA_DEVICE");
    return device ? std::atoi(device) : 0;
}

void need_context() {
    if (!current) die("no current context");
}

// One operation of each stream by turns: streams overtake each other, and nothing is done when the call returns.
void run_streams() {
    auto& d = driver();
    std::unique_lock lock(d.mutex);
    for (;;) {
        bool any = false;
        for (std::size_t i = 0; i < d.streams.size(); ++i) {
            FakeStream* stream = d.streams[i];
            if (stream->work.empty()) continue;
            auto work = std::move(stream->work.front());
            stream->work.pop_front();
            stream->running = any = true;
            lock.unlock();
            work();
            lock.lock();
            stream->running = false;
            d.wakes.notify_all();
        }
        if (!any) d.wakes.wait(lock);
    }
}

Status enqueue(cuda::Stream stream, std::function<void()> work) {
    need_context();
    auto& d = driver();
    std::lock_guard lock(d.mutex);
    reinterpret_cast<FakeStream*>(stream)->work.push_back(std::move(work));
    d.wakes.notify_all();
    return 0;
}

template <class Map>
auto find_range(Map& map, Pointer address) {
    auto next = map.upper_bound(address);
    return next == map.begin() ? map.end() : std::prev(next);
}

// The owner of device memory, or -1.
int device_of(Pointer address) {
    auto& d = driver();
    std::lock_guard lock(d.mutex);
    auto found = find_range(d.ranges, address);
    return found != d.ranges.end() && address < found->first + found->second.bytes ? found->second.device : -1;
}

bool is_pinned(Pointer address) {
    auto& d = driver();
    std::lock_guard lock(d.mutex);
    auto found = find_range(d.pinned, address);
    return found != d.pinned.end() && address < found->first + found->second;
}

int device_in_name(int fd) {
    char link[64], name[256] = {};
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, name, sizeof name - 1) < 0) die("a descriptor without a name");
    const char* at = std::strstr(name, "fake-gpu-");
    return at ? std::atoi(at + 9) : -1;
}

void copy(Pointer dst, Pointer src, std::size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// For the torture test: exportable "device memory", zeroed.
EXPORT void* fake_cuda_allocate(std::size_t bytes) {
    bytes = (bytes + 4095) / 4096 * 4096;
    std::string name = "fake-gpu-" + std::to_string(own_device());
    int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return nullptr;
    std::lock_guard lock(driver().mutex);
    driver().ranges[reinterpret_cast<Pointer>(base)] = {bytes, fd, own_device()};
    return base;
}

// "Device memory" that cannot be exported, as NCCL's signals: known to the driver, without a descriptor.
EXPORT void fake_cuda_adopt(void* base, std::size_t bytes) {
    std::lock_guard lock(driver().mutex);
    driver().ranges[reinterpret_cast<Pointer>(base)] = {bytes, -1, own_device()};
}

EXPORT Status cuInit(unsigned) {
    auto& d = driver();
    std::lock_guard lock(d.mutex);
    if (!d.gpu.joinable()) {
        d.gpu = std::thread(run_streams);
        current = reinterpret_cast<cuda::Context>(&d);  // as after cudaSetDevice
    }
    return 0;
}
EXPORT Status cuGetErrorName(Status, const char** name) {
    *name = "FAKE_ERROR";
    return 0;
}
EXPORT Status cuCtxGetCurrent(cuda::Context* context) {
    *context = current;
    return 0;
}
EXPORT Status cuCtxSetCurrent(cuda::Context context) {
    current = context;
    return 0;
}
EXPORT Status cuCtxGetDevice(cuda::DeviceOrdinal* device) {
    *device = own_device();
    return 0;
}
EXPORT Status cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return 0;
}
EXPORT Status cuDeviceGetUuid_v2(cuda::Uuid* uuid, cuda::DeviceOrdinal device) {
    std::memset(uuid, device + 1, sizeof *uuid);
    return 0;
}
EXPORT Status cuStreamCreateWithPriority(cuda::Stream* stream, unsigned flags, int) {
    need_context();
    if (flags != cuda::stream_non_blocking) die("a stream that waits for the default stream");
    auto* made = new FakeStream;
    std::lock_guard lock(driver().mutex);
    driver().streams.push_back(made);
    *stream = reinterpret_cast<cuda::Stream>(made);
    return 0;
}
EXPORT Status cuStreamQuery(cuda::Stream stream) {
    std::lock_guard lock(driver().mutex);
    auto* one = reinterpret_cast<FakeStream*>(stream);
    return one->work.empty() && !one->running ? 0 : not_ready;
}
EXPORT Status cuStreamSynchronize(cuda::Stream stream) {
    auto* one = reinterpret_cast<FakeStream*>(stream);
    std::unique_lock lock(driver().mutex);
    driver().wakes.wait(lock, [&] { return one->work.empty() && !one->running; });
    return 0;
}
EXPORT Status cuStreamWriteValue64_v2(cuda::Stream stream, Pointer word, std::uint64_t value, unsigned) {
    if (word % 8) return invalid_value;
    return enqueue(stream, [=] {
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(word)).store(value, std::memory_order_release);
    });
}
EXPORT Status cuMemcpyAsync(Pointer dst, Pointer src, std::size_t bytes, cuda::Stream stream) {
    int to = device_of(dst), from = device_of(src);
    if (to < 0 || from < 0) die("cuMemcpyAsync of memory that is not a device's");
    if (to == from) die("a direct copy within one GPU: it waits for ever under a kernel that fills the GPU");
    return enqueue(stream, [=] { copy(dst, src, bytes); });
}
EXPORT Status cuMemcpyHtoDAsync_v2(Pointer dst, const void* from, std::size_t bytes, cuda::Stream stream) {
    auto src = reinterpret_cast<Pointer>(from);
    if (device_of(dst) < 0 || device_of(src) >= 0) die("cuMemcpyHtoDAsync: wrong ends");
    if (is_pinned(src)) return enqueue(stream, [=] { copy(dst, src, bytes); });
    auto staged = std::vector<std::byte>(bytes);  // pageable memory is read before the call returns
    std::memcpy(staged.data(), from, bytes);
    return enqueue(stream, [dst, staged = std::move(staged)] {
        std::memcpy(reinterpret_cast<void*>(dst), staged.data(), staged.size());
    });
}
EXPORT Status cuMemcpyDtoHAsync_v2(void* to, Pointer src, std::size_t bytes, cuda::Stream stream) {
    auto dst = reinterpret_cast<Pointer>(to);
    if (device_of(src) < 0 || device_of(dst) >= 0) die("cuMemcpyDtoHAsync: wrong ends");
    enqueue(stream, [=] { copy(dst, src, bytes); });
    return is_pinned(dst) ? 0 : cuStreamSynchronize(stream);
}
EXPORT Status cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
    need_context();
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(*memory, 0xCD, bytes);  // whoever takes it for zeroed is found out
    std::lock_guard lock(driver().mutex);
    driver().pinned[reinterpret_cast<Pointer>(*memory)] = bytes;
    return 0;
}
EXPORT Status cuMemHostGetDevicePointer_v2(Pointer* device, void* host, unsigned) {
    *device = reinterpret_cast<Pointer>(host);
    return 0;
}
EXPORT Status cuMemGetAddressRange_v2(Pointer* base, std::size_t* bytes, Pointer address) {
    std::lock_guard lock(driver().mutex);
    auto found = find_range(driver().ranges, address);
    if (found == driver().ranges.end() || address >= found->first + found->second.bytes) return invalid_value;
    *base = found->first, *bytes = found->second.bytes;
    return 0;
}
// An allocation handle is its descriptor, plus one.
EXPORT Status cuMemRetainAllocationHandle(cuda::AllocationHandle* handle, void* address) {
    std::lock_guard lock(driver().mutex);
    auto found = find_range(driver().ranges, reinterpret_cast<Pointer>(address));
    if (found == driver().ranges.end()) return invalid_value;
    *handle = static_cast<cuda::AllocationHandle>(found->second.fd + 1);
    return 0;
}
EXPORT Status cuMemExportToShareableHandle(void* fd, cuda::AllocationHandle handle, int type, unsigned long long) {
    if (handle == 0 || type != cuda::handle_posix_fd) return not_supported;
    int made = fcntl(static_cast<int>(handle) - 1, F_DUPFD_CLOEXEC, 0);
    std::memcpy(fd, &made, sizeof made);
    return 0;
}
EXPORT Status cuMemImportFromShareableHandle(cuda::AllocationHandle* handle, void* fd, int) {
    int made = fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
    if (made < 0) return invalid_value;
    *handle = static_cast<cuda::AllocationHandle>(made + 1);
    return 0;
}
EXPORT Status cuMemAddressReserve(Pointer* base, std::size_t bytes, std::size_t, Pointer, unsigned long long) {
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return 2;
    *base = reinterpret_cast<Pointer>(at);
    return 0;
}
EXPORT Status cuMemMap(Pointer base, std::size_t bytes, std::size_t, cuda::AllocationHandle handle,
                       unsigned long long) {
    int fd = static_cast<int>(handle) - 1;
    if (mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return invalid_value;
    std::lock_guard lock(driver().mutex);
    driver().ranges[base] = {bytes, fcntl(fd, F_DUPFD_CLOEXEC, 0), device_in_name(fd)};
    return 0;
}
EXPORT Status cuMemSetAccess(Pointer base, std::size_t bytes, const cuda::AccessDescription* access, std::size_t) {
    if (access->location.type != cuda::location_device || access->location.id != own_device()) return invalid_value;
    return mprotect(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : invalid_value;
}
EXPORT Status cuMemUnmap(Pointer base, std::size_t) {
    std::lock_guard lock(driver().mutex);
    auto found = driver().ranges.find(base);
    if (found == driver().ranges.end()) die("unmapping what is not mapped");
    close(found->second.fd);
    driver().ranges.erase(found);
    return 0;
}
EXPORT Status cuMemAddressFree(Pointer base, std::size_t bytes) {
    munmap(reinterpret_cast<void*>(base), bytes);
    return 0;
}
EXPORT Status cuMemRelease(cuda::AllocationHandle handle) {
    auto& d = driver();
    std::lock_guard lock(d.mutex);
    for (auto& [base, range] : d.ranges)
        if (range.fd + 1 == static_cast<int>(handle)) return 0;  // retained, and still allocated
    if (handle) close(static_cast<int>(handle) - 1);
    return 0;
}
