// SPDX-License-Identifier: Apache-2.0
// What a dispatch remembers: for its combine, and for a later dispatch with the same routing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ep/routing.hpp"

namespace hal::ep {

// Rows received from one source for one group.
struct Received {
    std::int64_t place;  // first row here
    std::int64_t count;
    std::int64_t back;       // first row of the area to which combine returns them
    std::int64_t flat_back;  // the same where every row goes back the direct way; equal without nodes
};

// Hierarchical: one other node's source whose rows this rank forwards, and whose partial sums it sends back.
struct Forward {
    Routing routing;                   // of the source's crossing tokens, this node's destinations only
    std::vector<std::int64_t> place;   // [destinations]: first row at the owner
    std::vector<std::int64_t> gather;  // [destinations]: first row in this rank's gather area
};

// The routing of a handle; equal for every dispatch that reuses it.
struct Route {
    std::uint64_t epoch = 0;  // of the dispatch that exchanged the counts
    std::uint64_t view = 0;   // in which that was
    Routing home;
    std::vector<std::int64_t> place;    // [destinations]: this rank's first row at the owner
    std::vector<Received> received;     // [ranks][groups]
    std::vector<std::int64_t> starts;   // [groups + 1]
    std::vector<std::int32_t> crossed;  // [ranks]: tokens of each source that crossed to this node (hierarchical)
    std::vector<std::vector<std::int32_t>> crossing;  // [other nodes]: this rank's tokens that cross there
    std::vector<Forward> forwards;                    // [other nodes]
    bool known = false;  // forwards, and with schedule latency received, are filled by the first receive
};

// One dispatch: its route and the weights it carried.
struct State {
    std::shared_ptr<Route> route;
    std::vector<float> weights;                       // [tokens, k] at home
    std::vector<std::vector<float>> forward_weights;  // [other nodes][crossed tokens, k]
};

struct DispatchRound {
    std::uint64_t epoch = 0;
    std::uint32_t slot = 0;
    std::shared_ptr<State> state;
    std::vector<std::uint32_t> offered;  // [ranks]: the receive slot that each rank gave this round
    bool reuse = false;
    bool received = false;
};

struct CombineRound {
    std::uint64_t epoch = 0;
    std::shared_ptr<State> state;
    bool weighted = false;  // sum weight * row
    bool returns_weights = false;
    const std::byte* kept_x = nullptr;  // rows of this rank for its own tokens are summed from here, not from staging
    bool received = false;
};

}  // namespace hal::ep
