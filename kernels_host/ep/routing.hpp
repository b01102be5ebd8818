// SPDX-License-Identifier: Apache-2.0
// From top-k expert ids to the rows that travel: the same lists at whoever holds the ids (the home, or a forwarder on
// another node), so both ends number rows alike.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "hal/fabric.hpp"
#include "hal/shape.hpp"

namespace hal::ep {

// One row of one token.
struct Stop {
    std::int32_t destination;
    std::int32_t nth;       // among the rows from this source to the destination
    std::int32_t position;  // in the token's top-k; layout rank: of the first of its experts there
};

struct Routing {
    std::int32_t tokens = 0;
    std::vector<std::int32_t> ids;             // [tokens, k], global expert ids
    std::vector<std::int32_t> counts;          // rows to each destination
    std::vector<std::int32_t> first_stop;      // [tokens + 1] into stops
    std::vector<Stop> stops;                   // by token, in the order in which combine sums
    std::vector<std::int32_t> first_token;     // [destinations + 1] into by_destination
    std::vector<std::int32_t> by_destination;  // tokens, ascending, by destination

    std::int64_t rows_to(std::int32_t destination) const { return counts[std::size_t(destination)]; }
    // Row of a stop among all rows to destinations `first` and above, by destination, then token.
    std::int64_t row_of(const Stop& stop, std::int32_t first) const {
        return first_token[std::size_t(stop.destination)] - first_token[std::size_t(first)] + stop.nth;
    }
    const std::int32_t* tokens_to(std::int32_t destination) const {
        return by_destination.data() + first_token[std::size_t(destination)];
    }
};

// Stops of one token, appended. Ids outside [first, end) destinations belong to somebody else's list.
inline void append_stops(const EpShape& s, const std::int32_t* ids, std::int32_t first, std::int32_t end,
                         std::vector<Stop>& stops) {
    const std::size_t begin = stops.size();
    const std::int32_t per_destination = s.layout == Layout::rank ? local_experts(s) : 1;
    for (std::int32_t j = 0; j < s.top_k; ++j) {
        if (ids[j] == -1) continue;
        const std::int32_t d = ids[j] / per_destination;
        if (d < first || d >= end) continue;
        std::size_t at = stops.size();
        bool known = false;
        for (std::size_t i = begin; i < stops.size() && !known; ++i) known = stops[i].destination == d;
        if (known && s.layout == Layout::rank) continue;
        if (known) throw ContractViolation("topk_idx names expert " + std::to_string(ids[j]) + " twice in one token");
        // Layout rank sums by ascending rank, layout expert by top-k position.
        if (s.layout == Layout::rank)
            while (at > begin && stops[at - 1].destination > d) --at;
        stops.insert(stops.begin() + std::ptrdiff_t(at), Stop{d, 0, j});
    }
}

// Rows of `tokens` tokens with these [tokens, k] ids to the destinations [first, end).
inline Routing make_routing(const EpShape& s, std::vector<std::int32_t> ids, std::int32_t tokens, std::int32_t first,
                            std::int32_t end) {
    Routing r;
    r.tokens = tokens;
    r.ids = std::move(ids);
    r.counts.assign(std::size_t(destinations(s)), 0);
    r.first_stop.reserve(std::size_t(tokens) + 1);
    r.stops.reserve(std::size_t(tokens) * std::size_t(s.top_k));
    r.first_stop.push_back(0);
    for (std::int32_t t = 0; t < tokens; ++t) {
        append_stops(s, r.ids.data() + std::int64_t(t) * s.top_k, first, end, r.stops);
        for (std::size_t i = std::size_t(r.first_stop.back()); i < r.stops.size(); ++i)
            r.stops[i].nth = r.counts[std::size_t(r.stops[i].destination)]++;
        r.first_stop.push_back(std::int32_t(r.stops.size()));
    }
    r.first_token.assign(r.counts.size() + 1, 0);
    for (std::size_t d = 0; d < r.counts.size(); ++d) r.first_token[d + 1] = r.first_token[d] + r.counts[d];
    r.by_destination.resize(r.stops.size());
    for (std::int32_t t = 0; t < tokens; ++t)
        for (std::int32_t i = r.first_stop[std::size_t(t)]; i < r.first_stop[std::size_t(t) + 1]; ++i) {
            const Stop& stop = r.stops[std::size_t(i)];
            r.by_destination[std::size_t(r.first_token[std::size_t(stop.destination)] + stop.nth)] = t;
        }
    return r;
}

// Tokens with a stop among destinations [first, end), ascending: what crosses to one node.
inline std::vector<std::int32_t> crossing(const Routing& r, std::int32_t first, std::int32_t end) {
    std::vector<std::int32_t> tokens;
    for (std::int32_t t = 0; t < r.tokens; ++t)
        for (std::int32_t i = r.first_stop[std::size_t(t)]; i < r.first_stop[std::size_t(t) + 1]; ++i) {
            const std::int32_t d = r.stops[std::size_t(i)].destination;
            if (d < first || d >= end) continue;
            tokens.push_back(t);
            break;
        }
    return tokens;
}

}  // namespace hal::ep
