// Moves bytes between ranks, for the group: through gloo, or from this rank to itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <vector>

namespace simdev {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
using Splits = std::vector<int64_t>;

// All tensors are flat and contiguous, on the host.
class Transport {
 public:
  virtual ~Transport() = default;

  // out[i] = what rank i has in `in`; all as long.
  virtual void gather(const at::Tensor& in, std::vector<at::Tensor> out) = 0;
  // The part of `in` for rank i goes there, and the part of `out` from rank i comes from there; in elements.
  virtual void exchange(const at::Tensor& in, at::Tensor out, const Splits& in_splits, const Splits& out_splits) = 0;
  virtual void broadcast(at::Tensor tensor, int root) = 0;
  // `terms` of all ranks, added up (or as `op` says) into `out`.
  virtual void reduce(const std::vector<at::Tensor>& terms, at::Tensor out, const c10d::ReduceOp& op) = 0;
  virtual void barrier() = 0;
  // Sends so many messages of nobody's values and receives as many: round the ring, or one to each other rank.
  virtual void load(int64_t bytes, int messages, bool to_each) = 0;
  virtual c10::intrusive_ptr<c10d::Work> send(at::Tensor tensor, int to, int tag) = 0;
  virtual c10::intrusive_ptr<c10d::Work> receive(at::Tensor tensor, int from, int tag) = 0;
};

std::unique_ptr<Transport> through_gloo(c10::intrusive_ptr<c10d::Backend> gloo);
std::unique_ptr<Transport> to_itself(int rank, int size);

}  // namespace simdev
