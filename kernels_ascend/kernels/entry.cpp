// SPDX-License-Identifier: Apache-2.0
// The kernels as they are launched. Vector cores only; any number of them.
#include "entry.h"

#include "combine.h"
#include "dispatch.h"
#include "primitives.h"

namespace hal::ascend {

template <Completion C>
HAL_AICORE void run_dispatch(GM_ADDR args, bool receive) {
    Core core(args);
    Dispatch<C> dispatch(core);
    if (receive)
        dispatch.recv();
    else
        dispatch.send();
    core.finish();
}

template <Completion C, class T>
HAL_AICORE void run_combine(GM_ADDR args, bool receive) {
    Core core(args);
    Combine<C, T> combine(core);
    if (receive)
        combine.recv();
    else
        combine.send();
    core.finish();
}

template <Completion C>
HAL_AICORE void run_combine_of(GM_ADDR args, std::int32_t element, bool receive) {
    if (element == 0)
        run_combine<C, bfloat16_t>(args, receive);
    else if (element == 1)
        run_combine<C, half>(args, receive);
    else
        run_combine<C, float>(args, receive);
}

HAL_AICORE void dispatch_any(GM_ADDR args, bool receive) {
    switch (reinterpret_cast<const __gm__ EpArgs*>(args)->shape.completion) {
        case Completion::strong_signal:
            return run_dispatch<Completion::strong_signal>(args, receive);
        case Completion::strong_signal_no_cqe:
            return run_dispatch<Completion::strong_signal_no_cqe>(args, receive);
        case Completion::strong_last:
            return run_dispatch<Completion::strong_last>(args, receive);
        case Completion::flag_in_block:
            return run_dispatch<Completion::flag_in_block>(args, receive);
    }
}

HAL_AICORE void combine_any(GM_ADDR args, bool receive) {
    const std::int32_t element = reinterpret_cast<const __gm__ EpArgs*>(args)->element;
    switch (reinterpret_cast<const __gm__ EpArgs*>(args)->shape.completion) {
        case Completion::strong_signal:
            return run_combine_of<Completion::strong_signal>(args, element, receive);
        case Completion::strong_signal_no_cqe:
            return run_combine_of<Completion::strong_signal_no_cqe>(args, element, receive);
        case Completion::strong_last:
            return run_combine_of<Completion::strong_last>(args, element, receive);
        case Completion::flag_in_block:
            return run_combine_of<Completion::flag_in_block>(args, element, receive);
    }
}

}  // namespace hal::ascend

extern "C" __global__ [[bisheng::core_ratio(0, 1)]] __aicore__ void hal_dispatch_send(GM_ADDR args) {
    hal::ascend::dispatch_any(args, false);
}
extern "C" __global__ [[bisheng::core_ratio(0, 1)]] __aicore__ void hal_dispatch_recv(GM_ADDR args) {
    hal::ascend::dispatch_any(args, true);
}
extern "C" __global__ [[bisheng::core_ratio(0, 1)]] __aicore__ void hal_combine_send(GM_ADDR args) {
    hal::ascend::combine_any(args, false);
}
extern "C" __global__ [[bisheng::core_ratio(0, 1)]] __aicore__ void hal_combine_recv(GM_ADDR args) {
    hal::ascend::combine_any(args, true);
}
extern "C" __global__ [[bisheng::core_ratio(0, 1)]] __aicore__ void hal_primitive(GM_ADDR args) {
    hal::ascend::Primitives primitives(args);
    primitives.run();
}
