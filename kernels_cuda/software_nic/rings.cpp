// SPDX-License-Identifier: Apache-2.0
#include "rings.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace hal::swnic {
namespace {

std::size_t bytes_for(std::size_t nranks) { return nranks * sizeof(RankCell) + nranks * nranks * sizeof(SignalRing); }

}  // namespace

int SharedRings::create(int nranks) {
    int fd = memfd_create("hal-swnic-rings", MFD_CLOEXEC);
    if (fd < 0) throw std::runtime_error("cannot make shared memory for the signal rings");
    if (ftruncate(fd, static_cast<off_t>(bytes_for(static_cast<std::size_t>(nranks)))) != 0) {
        close(fd);
        throw std::runtime_error("cannot size shared memory for the signal rings");
    }
    return fd;
}

SharedRings::SharedRings(int fd, int nranks) : nranks_(static_cast<std::size_t>(nranks)) {
    base_ = mmap(nullptr, bytes_for(nranks_), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base_ == MAP_FAILED) throw std::runtime_error("cannot map the signal rings");
    cells_ = static_cast<RankCell*>(base_);
    rings_ = reinterpret_cast<SignalRing*>(cells_ + nranks_);
}

SharedRings::~SharedRings() { munmap(base_, bytes_for(nranks_)); }

}  // namespace hal::swnic
