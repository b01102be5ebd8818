// SPDX-License-Identifier: Apache-2.0
// The end of a round that all ranks hold or none (on_peer_loss = mask): no rank uses a round's results before every rank
// has said that it holds all of that round's rows. If a rank is then lost and anyone's round had ended, everyone's can end
// as it is; else everyone repeats it without the lost rank. Rounds are counted in the order in which they are received,
// which is the same on all ranks. Without it (EpShape::agreed) both calls do nothing.
#pragma once
#include <cstdint>

#include "hal/buffer_layout.hpp"
#include "hal/fabric.hpp"
#include "hal/members.hpp"

namespace hal::ep {

template <class Fabric>
class Agreement {
  public:
    Agreement(Fabric& fabric, const BufferLayout& layout, const Members& members)
        : f_(fabric), l_(layout), members_(members), me_(fabric.rank()) {}

    // All rows of the round are here, and what this rank owed to others was sent.
    void say() {
        if (!l_.shape.agreed) return;
        ++said_;
        for (int i = 1; i < l_.shape.ranks; ++i)
            if (const int p = peer(i); !is_lost(members_, p))
                f_.signal(0, p, word(me_), said_, SignalOp::set, Order::strong);
    }

    // Everyone has said so.
    void await(const char* stage) {
        if (!l_.shape.agreed) return;
        for (int i = 1; i < l_.shape.ranks; ++i)
            if (const int p = peer(i); !is_lost(members_, p)) f_.wait(word(p), said_, p, 0, stage);
        end();
    }

    // This rank's own word tells its peers that the round has ended here, so it may end for them, also if this rank is
    // gone by then.
    void end() { f_.signal(0, me_, word(me_), said_, SignalOp::set, Order::strong); }

  private:
    int peer(int i) const { return (me_ + i) % l_.shape.ranks; }
    std::uint64_t word(int rank) const { return l_.signal(Sig::agreed, std::uint64_t(rank)); }

    Fabric& f_;
    const BufferLayout& l_;
    const Members members_;
    const int me_;
    std::uint64_t said_ = 0;
};

}  // namespace hal::ep
