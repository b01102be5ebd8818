// SPDX-License-Identifier: Apache-2.0
#include "transport/shm_segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "hal/fabric.hpp"

namespace hal {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const char* what, std::size_t nbytes, int error) {
    throw std::system_error(error, std::generic_category(),
                            std::string(what) + " of " + std::to_string(nbytes) + " bytes");
}

std::size_t round_to_page(std::size_t nbytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (nbytes + page - 1) / page * page;
}

}  // namespace

int ShmSegment::create(std::size_t nbytes) {
    const int fd = memfd_create("hal-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) fail("memfd_create", nbytes, errno);
    if (ftruncate(fd, static_cast<off_t>(round_to_page(nbytes))) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
        const int error = errno;
        ::close(fd);
        fail("shared memory", nbytes, error);
    }
    return fd;
}

ShmSegment::ShmSegment(int fd, std::size_t nbytes) : nbytes_(nbytes), mapped_(round_to_page(nbytes)) {
    struct stat info{};
    if (fstat(fd, &info) != 0) fail("fstat", nbytes, errno);
    const int seals = fcntl(fd, F_GET_SEALS);
    if (static_cast<std::size_t>(info.st_size) != mapped_ || seals < 0 || (seals & kSeals) != kSeals)
        throw ContractViolation("a peer's shared memory has " + std::to_string(info.st_size) + " bytes where " +
                                std::to_string(mapped_) + " sealed ones were agreed");
    void* address = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) fail("mmap", nbytes, errno);
    data_ = static_cast<std::byte*>(address);
}

ShmSegment::~ShmSegment() {
    if (data_ != nullptr) munmap(data_, mapped_);
}

}  // namespace hal
