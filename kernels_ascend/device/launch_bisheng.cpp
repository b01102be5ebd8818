// SPDX-License-Identifier: Apache-2.0
// The only file that speaks bisheng's launch syntax. Never compiled with bisheng, never run on an NPU.
#include "device/launch.h"
#include "kernels/entry.h"

namespace hal::ascend {

void launch_on_device(Kernel kernel, void* stream, std::uint8_t* args, int cores) {
    switch (kernel) {
        case Kernel::dispatch_send:
            hal_dispatch_send<<<cores, nullptr, stream>>>(args);
            break;
        case Kernel::dispatch_recv:
            hal_dispatch_recv<<<cores, nullptr, stream>>>(args);
            break;
        case Kernel::combine_send:
            hal_combine_send<<<cores, nullptr, stream>>>(args);
            break;
        case Kernel::combine_recv:
            hal_combine_recv<<<cores, nullptr, stream>>>(args);
            break;
        case Kernel::primitive:
            hal_primitive<<<cores, nullptr, stream>>>(args);
            break;
    }
}

}  // namespace hal::ascend
