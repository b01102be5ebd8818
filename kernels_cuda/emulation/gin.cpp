// SPDX-License-Identifier: Apache-2.0
#include "emulation/gin.hpp"

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "emulation/options.hpp"
#include "src/gin.cuh"

namespace hal::cuda {
int fail(const std::string& text);
}

namespace hal::cuda::emulation {

std::atomic<NetworkMutation> network_mutation{NetworkMutation::none};

Gin::Gin(Communicator& comm, int queues, int signals, bool strong, bool rail)
    : comm_(comm), signals_(signals), strong_(strong), rail_(rail),
      memory_(comm.create(sizeof(std::uint64_t) * static_cast<std::size_t>(std::max(queues * signals, 1)))),
      nic_(comm.world, comm.rank, queues) {}

Nic::Span Gin::find(std::uint64_t window, int peer, std::uint64_t offset, std::uint64_t bytes,
                    std::string& trouble) const {
    if (peer < 0 || peer >= comm_.world) {
        trouble = "rank " + std::to_string(peer) + " of " + std::to_string(comm_.world);
        return {};
    }
    if (rail_ && peer % comm_.lsa_size() != comm_.lsa_rank()) {
        trouble = "rank " + std::to_string(peer) + " is not on the rail of rank " + std::to_string(comm_.rank) +
                  ", and GIN has rail connections";
        return {};
    }
    const std::shared_ptr<Window> found = comm_.find(window);
    if (found == nullptr) {
        trouble = "no window has the handle " + std::to_string(window);
        return {};
    }
    if (offset > found->bytes() || bytes > found->bytes() - offset) {
        trouble = "bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of a window of " +
                  std::to_string(found->bytes()) + ", rank " + std::to_string(peer);
        return {};
    }
    return {found->of_rank(peer) + offset, found};
}

std::uint64_t* Gin::signal(int peer, int queue, int index) const {
    return reinterpret_cast<std::uint64_t*>(memory_->of_rank(peer)) + queue * signals_ + index;
}
Nic::Span Gin::signal_span(int peer, int queue, int index) const {
    return {reinterpret_cast<std::byte*>(signal(peer, queue, index)), memory_};
}

}  // namespace hal::cuda::emulation

using namespace hal::cuda;

extern "C" int hal_cuda_emulator_mutate_network(int defect) {
    if (defect < 0 || defect >= static_cast<int>(emulation::NetworkMutation::count))
        return fail("no such defect: " + std::to_string(defect));
    emulation::network_mutation.store(static_cast<emulation::NetworkMutation>(defect));
    return 0;
}

extern "C" int hal_cuda_gin_create(void* comm, const hal_cuda_gin_needs* needs, hal_cuda_gin* out,
                                   hal_cuda_gin_properties* got) {
    auto& c = *static_cast<emulation::Communicator*>(comm);
    const std::string kind = emulation::options().gin;
    if (kind == "none")
        return fail(
            "the emulated ranks have no network card (HAL_CUDA_EMULATOR_GIN=none), so nothing leaves the NVLink "
            "domain");
    try {
        const bool rail = kind == "rail";
        c.gin = std::make_shared<emulation::Gin>(c, needs->queues, needs->signals, needs->strong != 0, rail);
        const std::uint64_t bytes = gin::Words::bytes(needs->slots, needs->queues, c.world);
        const std::shared_ptr<emulation::Window> words = c.create(bytes);
        c.gin_state.assign(gin::Counts::bytes(needs->queues, c.world) / sizeof(std::uint64_t), 0);
        *out = {};
        out->comm = reinterpret_cast<std::uint64_t>(c.gin.get());
        out->window = reinterpret_cast<std::uint64_t>(words.get());
        out->words = reinterpret_cast<std::uint64_t>(words->of_rank(c.rank));
        out->peers = reinterpret_cast<std::uint64_t>(words->peers()), out->peer_stride = words->stride();
        out->state = reinterpret_cast<std::uint64_t>(c.gin_state.data());
        out->world = c.world, out->rank = c.rank, out->lsa_size = c.lsa_size(), out->lsa_rank = c.lsa_rank();
        out->queues = needs->queues, out->signals = needs->signals, out->slots = needs->slots;
        out->strong = needs->strong != 0, out->rail = rail;
        *got = {};
        got->type = emulation::kEmulatedGin, got->connection = rail ? HAL_CUDA_GIN_RAIL : HAL_CUDA_GIN_FULL;
        got->contexts = needs->queues, got->connections = 1, got->signals = needs->signals;
        got->strong = needs->strong != 0, got->va_signals = 1, got->traffic_class = needs->traffic_class;
        got->lsa_size = c.lsa_size(), got->rail_size = c.nodes;
        return 0;
    } catch (const std::exception& error) {
        return fail(error.what());
    }
}
