// Tensors of the device as the host, or torch's meta device, sees them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "accesses.h"
#include "memory.h"

namespace simdev {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The same memory, as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor);

// The block that a tensor lies in; none where it has no memory.
Block* block_of(const at::Tensor& tensor);

// [Note: The host].
bool in_host_memory(const at::Tensor& tensor);

// What a kernel that reads or writes all of a tensor touches. The gaps of a strided one count too.
void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool writes);

// [Note: Words]: whether the values are known; always, in real mode.
bool is_known(const at::Tensor& tensor);
// Whether a kernel of the host may write to it.
bool is_backed(const at::Tensor& tensor);
// Notes that a tensor was written to, with known values or not.
void wrote(const at::Tensor& tensor, bool known);

}  // namespace simdev
