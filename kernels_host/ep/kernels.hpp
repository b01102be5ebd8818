// SPDX-License-Identifier: Apache-2.0
// One rank's dispatch and combine kernels over one Fabric, whose window is laid out by hal/buffer_layout.hpp.
//
// The window's content before the first call is zero on every rank. All ranks make the same calls in the same order.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "ep/combine.hpp"
#include "ep/dispatch.hpp"

namespace hal::ep {

template <class Fabric>
class Kernels {
  public:
    // `shape` is that of the first view; the window is laid out for shape_in_view(shape, members).
    Kernels(Fabric& fabric, const EpShape& shape, Element combine_element, const Members& members = {})
        : layout_(checked(fabric, shape, members)), agreement_(fabric, layout_, members),
          dispatch_(fabric, layout_, members, agreement_),
          combine_(fabric, layout_, combine_element, is_hierarchical(shape), members, agreement_) {}

    Kernels(const Kernels&) = delete;  // its parts refer to each other
    Kernels& operator=(const Kernels&) = delete;

    const BufferLayout& layout() const { return layout_; }

    // `slot` is a receive slot that nobody holds; it is held until recv has returned and its rows are no longer used.
    DispatchRound dispatch_send(std::uint32_t slot, const DispatchInput& in, const State* reused) {
        if (slot >= std::uint32_t(layout_.shape.num_buffers))
            throw ContractViolation("receive slot " + std::to_string(slot) + " of " +
                                    std::to_string(layout_.shape.num_buffers));
        return dispatch_.send(slot, in, reused);
    }
    std::int64_t rows(const DispatchRound& round) const { return dispatch_.rows(round); }
    void dispatch_recv(DispatchRound& round, const DispatchOutput& out) { dispatch_.recv(round, out); }
    // The round that waits for agreement has ended on another rank, so everyone has agreed.
    void end_round() { agreement_.end(); }
    std::uint64_t received_x(const DispatchRound& round) const { return dispatch_.receive_area(round.slot).x(0); }

    CombineRound combine_send(const CombineInput& in, std::shared_ptr<State> state) {
        return combine_.send(in, std::move(state));
    }
    void combine_recv(CombineRound& round, const void* const* bias, int bias_count, const CombineOutput& out) {
        combine_.recv(round, bias, bias_count, out);
    }

  private:
    static BufferLayout checked(const Fabric& fabric, const EpShape& s, const Members& members) {
        const auto refuse = [](const std::string& why) { throw ContractViolation(why); };
        if (s.ranks != fabric.world_size())
            refuse("shape for " + std::to_string(s.ranks) + " ranks on a fabric of " +
                   std::to_string(fabric.world_size()));
        if (s.num_experts % s.ranks)
            refuse(std::to_string(s.num_experts) + " experts do not divide by " + std::to_string(s.ranks) + " ranks");
        if (s.nodes < 1 || s.ranks % s.nodes)
            refuse(std::to_string(s.ranks) + " ranks do not divide by " + std::to_string(s.nodes) + " nodes");
        if (s.num_buffers < 1 || s.num_buffers > std::int32_t(ready_slots()))
            refuse("num_buffers is " + std::to_string(s.num_buffers) + "; use 1 ... " + std::to_string(ready_slots()));
        if (s.agreed && s.ranks > most_maskable_ranks())
            refuse("lost ranks can be masked among at most " + std::to_string(most_maskable_ranks()) + " ranks, not " +
                   std::to_string(s.ranks));
        if (members.lost && !s.agreed) refuse("ranks are masked and the shape has no agreement");
        if (is_lost(members, fabric.rank())) refuse("this rank itself is masked");
        const BufferLayout layout = buffer_layout(shape_in_view(s, members));
        if (layout.total > fabric.size())
            refuse("the window has " + std::to_string(fabric.size()) + " bytes and the shape needs " +
                   std::to_string(layout.total));
        return layout;
    }

    const BufferLayout layout_;
    Agreement<Fabric> agreement_;
    Dispatch<Fabric> dispatch_;
    Combine<Fabric> combine_;
};

}  // namespace hal::ep
