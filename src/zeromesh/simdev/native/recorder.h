// Tells a Python function of every kernel, collective and order between streams, in the order in which the host issues them.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

namespace simdev::recorder {

extern bool on;

void order(const char* kind, int stream, int64_t event);
void kernel(const std::string& name, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results);
void collective(const std::string& name, int64_t ranks, int64_t sent_bytes, int stream, const std::string& group);

}  // namespace simdev::recorder
