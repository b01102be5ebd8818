// SPDX-License-Identifier: Apache-2.0
#include "log.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace hal::swnic {
namespace {

std::atomic<abi::Logger> current{nullptr};

void emit(abi::LogLevel level, const char* format, std::va_list arguments) {
    char text[2048];
    std::vsnprintf(text, sizeof text, format, arguments);
    auto logger = current.load(std::memory_order_acquire);
    if (logger) logger(level, abi::log_init | abi::log_net, "software_nic", 0, "%s", text);
    const char* shown = std::getenv("NCCL_DEBUG");
    bool silent = !logger || !shown || !*shown;
    if (level == abi::log_warn && silent) std::fprintf(stderr, "hal-swnic: %s\n", text);
}

}  // namespace

void set_logger(abi::Logger logger) {
    if (logger) current.store(logger, std::memory_order_release);
}

void warn(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    emit(abi::log_warn, format, arguments);
    va_end(arguments);
}

void info(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    emit(abi::log_info, format, arguments);
    va_end(arguments);
}

}  // namespace hal::swnic
