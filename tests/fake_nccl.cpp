// SPDX-License-Identifier: Apache-2.0
// An NCCL that only counts what is asked of it, to see which communicators HAL makes, keeps and destroys.
#include <nccl.h>
#include <nccl_device.h>

#include <cstring>
#include <map>
#include <string>

namespace {
std::map<std::string, int> calls;
int made_here, lent;  // their addresses are communicators
}  // namespace

extern "C" {

int fake_calls(const char* name) { return calls[name]; }
void* fake_lent() { return &lent; }

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return nullptr; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::memset(id, 0, sizeof *id);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t*) {
    *comm = reinterpret_cast<ncclComm_t>(&made_here);
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) {
    ++calls["destroy"];
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) {
    ++calls["abort"];
    return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void**, size_t) { return ncclSystemError; }
ncclResult_t ncclMemFree(void*) { return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) { return ncclSystemError; }
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
ncclResult_t ncclGetLsaDevicePointer(ncclWindow_t, size_t, int, void**) { return ncclSystemError; }
ncclResult_t ncclCommQueryProperties(ncclComm_t, ncclCommProperties_t* properties) {
    properties->nRanks = 1, properties->rank = 0, properties->deviceApiSupport = true;
    return ncclSuccess;
}
ncclResult_t ncclDevCommCreate(ncclComm_t, ncclDevCommRequirements_t const*, ncclDevComm_t* out) {
    ++calls["device create"];
    std::memset(out, 0, sizeof *out);
    return ncclSuccess;
}
ncclResult_t ncclDevCommDestroy(ncclComm_t, ncclDevComm_t const*) {
    ++calls["device destroy"];
    return ncclSuccess;
}

}  // extern "C"
