// Random numbers of the device, and what is registered once.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/StorageImpl.h>

#include <optional>

namespace simdev {

const at::Generator& default_generator();

// The generator of the host that draws the numbers of one of the device's; of the device's default one without it.
at::Generator host_generator(const std::optional<at::Generator>& generator);

// Its first bytes are kept, as far as they go on.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

void register_hooks();
void register_kernels();

}  // namespace simdev
