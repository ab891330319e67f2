// Streams and events that run nothing later: each stream has a vector clock, and an event carries one away.
//
// [Note: Clocks] Kernels run at once, in the order in which the host issues them, so numbers are right whatever is waited
// for. What a device would have had to wait for is in the clocks: `clock[i]` of a stream says how much of stream i has
// been done before whatever the stream does next. An access at time t of stream i comes before what stream s does now
// if, and only if, `now(s)[i] >= t`. Nothing depends on timing: a wait that is missing is missing in every run.
//
// The host has one clock for all of its threads: what it has waited for comes before all that it issues afterwards.
//
// [Note: Launch order] Kernels of a device's communicators may run in any order, or, as with NCCL_LAUNCH_ORDER_IMPLICIT,
// each begins once all that were launched before it have begun. Then it also comes after all that their streams did before
// them, but not after these kernels themselves.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "wall.h"

namespace simdev {

// The default stream, and 32 of each of two priorities, handed out in turn, as CUDA's.
constexpr int kPooled = 32;
constexpr int kStreams = 1 + 2 * kPooled;
using Clock = std::array<int64_t, kStreams>;

struct Event {
  Clock clock{};
  int64_t serial = 0;  // of its last recording
  int stream = -1;     // which that was on; -1 before the first
  wall::MarkPtr mark{};
};

// Guards all that the device knows. Recursive, as what is freed while it is held frees other things.
std::recursive_mutex& lock();
using Locked = std::lock_guard<std::recursive_mutex>;

int current_stream();            // of the calling thread
int exchange_stream(int stream); // returns the one before
int new_stream(bool high_priority);

const Clock& now(int stream);
const Clock& host_now();
int64_t time_of(int stream);
bool covers(const Clock& clock, const Clock& other);

// The stream's clock as an event would carry it away.
Clock marked(int stream);
void record(Event& event, int stream);
void wait(int stream, const Event& event);

// Of collectives, from now on: [Note: Launch order].
void keep_launch_order(bool kept);
void launch_collective(int stream);

void host_waits_for(int stream);
void host_waits_for(const Event& event);
void host_waits_for_all();

}  // namespace simdev
