// SPDX-License-Identifier: Apache-2.0
// CUDA graphs behind the C interface.
#include <cuda_runtime.h>

#include <string>

#include "emulation/hal_cuda_emulator.h"

namespace hal::cuda {
int fail(const std::string& text);
int check(cudaError_t status, const char* what);
}  // namespace hal::cuda

using hal::cuda::check;

extern "C" {

int hal_cuda_emulator_begin_capture(std::uint64_t stream, int mode) {
    if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed)
        return hal::cuda::fail("no such mode of capture: " + std::to_string(mode));
    return check(
        cudaStreamBeginCapture(reinterpret_cast<cudaStream_t>(stream), static_cast<cudaStreamCaptureMode>(mode)),
        "cudaStreamBeginCapture");
}

int hal_cuda_emulator_end_capture(std::uint64_t stream, std::uint64_t* graph) {
    cudaGraph_t captured = nullptr;
    cudaGraphExec_t exec = nullptr;
    if (check(cudaStreamEndCapture(reinterpret_cast<cudaStream_t>(stream), &captured), "cudaStreamEndCapture") != 0)
        return -1;
    const int failed = check(cudaGraphInstantiate(&exec, captured), "cudaGraphInstantiate");
    cudaGraphDestroy(captured);
    *graph = reinterpret_cast<std::uint64_t>(exec);
    return failed;
}

int hal_cuda_emulator_launch_graph(std::uint64_t graph, std::uint64_t stream) {
    return check(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(graph), reinterpret_cast<cudaStream_t>(stream)),
                 "cudaGraphLaunch");
}

int hal_cuda_emulator_destroy_graph(std::uint64_t graph) {
    return check(cudaGraphExecDestroy(reinterpret_cast<cudaGraphExec_t>(graph)), "cudaGraphExecDestroy");
}

}  // extern "C"
