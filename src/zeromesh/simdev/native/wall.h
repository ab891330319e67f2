// Streams on a wall clock, for the clocked mode: when each thing that the host has issued begins and ends.
//
// [Note: Wall clock] Nothing computes. A kernel makes its stream free later, by arithmetic, and takes neither a processor
// nor a thread. A mark is a place in a stream; its time is known once all before it is, mostly before that time comes.
// What takes as long as it takes, a collective over gloo or a copy on the host's link, runs in a thread of its stream:
// it sleeps until the stream is free, runs, and then the stream is free. The host waits until a mark is known, and then
// until its time. All times are seconds of the machine's clock, `dilation` of them for one of the device's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace simdev::wall {

struct Rates {
  double flops, memory;           // of matrix products, and bytes of other kernels, in a second of the device
  double host_copy, host_memory;  // bytes of copies, and of the host's operators
  double dilation;
};

struct Mark;
using MarkPtr = std::shared_ptr<Mark>;  // none outside the clocked mode, where it counts as over

void start(const Rates& rates);
bool on();

void kernel(int stream, double flops, double bytes);
void copy(int stream, bool up, int64_t bytes);  // one at a time in each direction
void run(int stream, std::function<void()> job);
void host_works(double bytes);  // in the calling thread: [Note: The host]
MarkPtr mark(int stream);
void wait(int stream, const MarkPtr& mark);

// [Note: Launch order]: the next item of the stream begins once that of the last call has begun.
void begin_in_order(int stream);
void forget_order();

bool is_over(const MarkPtr& mark);
// The caller must not hold the device's lock. Raises the error of a job of any stream.
void host_waits(const MarkPtr& mark);
// Of the device; both are over.
double seconds_between(const MarkPtr& from, const MarkPtr& to);

}  // namespace simdev::wall
