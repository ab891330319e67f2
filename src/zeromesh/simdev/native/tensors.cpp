#include "tensors.h"

#include <ATen/ops/from_blob.h>

namespace simdev {
namespace {

// Start and end of the bytes that a tensor's elements span in its storage.
std::pair<size_t, size_t> span_of(const at::Tensor& tensor) {
  size_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += static_cast<size_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  const size_t begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  void* data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), options);
}

Block* block_of(const at::Tensor& tensor) { return block_at(tensor.storage().data()); }

bool in_host_memory(const at::Tensor& tensor) {
  if (!is_virtual() || !on_device(tensor)) return false;
  const Block* block = block_of(tensor);
  return block != nullptr && block->host;
}

void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool writes) {
  Block* block = tensor.numel() == 0 ? nullptr : block_of(tensor);
  if (block == nullptr) return;
  const auto [begin, end] = span_of(tensor);
  touches.push_back({block, begin, end, writes});
}

bool is_known(const at::Tensor& tensor) {
  if (!is_virtual() || tensor.numel() == 0) return true;
  const Block* block = block_of(tensor);
  return block != nullptr && block->known;
}

bool is_backed(const at::Tensor& tensor) {
  if (!is_virtual() || tensor.numel() == 0) return true;
  const Block* block = block_of(tensor);
  return block != nullptr && block->small;
}

void wrote(const at::Tensor& tensor, bool known) {
  if (!is_virtual() || tensor.numel() == 0) return;
  Block* block = block_of(tensor);
  if (block == nullptr) return;
  const auto [begin, end] = span_of(tensor);
  const bool all = begin == 0 && end >= block->requested && tensor.is_non_overlapping_and_dense();
  block->known = known && block->small && (block->known || all);
}

}  // namespace simdev
