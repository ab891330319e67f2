// A process group for tensors of the device, ordered by streams as NCCL's is.
//
// [Note: Collectives] A collective that the caller waits for at once runs on the caller's stream; any other on the group's
// own, after what the caller's holds, and `Work.wait()` makes the caller's stream come after it. The host does not wait in
// this model. In fact it does: data moves at once, through gloo on the same memory, so ranks must issue in one order.
// Sums are taken in fp32 (fp64 for fp64) in the order of the ranks and rounded to the tensors' dtype, the same on all.
//
// Without gloo the group counts: every other rank is taken to hold what this one holds. So a sum is this rank's value times
// the number of ranks, what is gathered is this rank's over and over, and any world fits one process.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>

namespace simdev {

c10::intrusive_ptr<c10d::Backend> make_group(
    int rank, int size, const c10::intrusive_ptr<c10d::Backend>& gloo, std::chrono::milliseconds timeout);

}  // namespace simdev
