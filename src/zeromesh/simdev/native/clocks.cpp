#include "clocks.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "recorder.h"

namespace simdev {
namespace {

std::array<Clock, kStreams> first_clocks() {
  std::array<Clock, kStreams> clocks{};
  for (int stream = 0; stream < kStreams; ++stream) clocks[stream][stream] = 1;
  return clocks;
}

std::array<Clock, kStreams> clocks = first_clocks();
Clock host{};
int64_t serials = 0;
bool order_kept = false;
Clock launched{};  // everything before the start of the collective that was launched last
thread_local int current = 0;

void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) clock[i] = std::max(clock[i], other[i]);
}

// Later operations of the stream get another time than those before.
void tick(int stream) { ++clocks[stream][stream]; }

}  // namespace

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;  // never destroyed: tensors may outlive everything else
  return *mutex;
}

int current_stream() { return current; }

int exchange_stream(int stream) { return std::exchange(current, stream); }

int new_stream(bool high_priority) {
  static std::atomic<uint32_t> normal{0}, high{0};
  const int index = static_cast<int>((high_priority ? high : normal)++ % kPooled);
  return 1 + index + (high_priority ? kPooled : 0);
}

const Clock& now(int stream) {
  join(clocks[stream], host);
  return clocks[stream];
}

const Clock& host_now() { return host; }

int64_t time_of(int stream) { return clocks[stream][stream]; }

bool covers(const Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; ++i)
    if (clock[i] < other[i]) return false;
  return true;
}

Clock marked(int stream) {
  Locked locked(lock());
  const Clock clock = now(stream);
  tick(stream);
  return clock;
}

// Call the recorder without the device's lock: it takes the interpreter's, whose holder may wait for the device's.

void record(Event& event, int stream) {
  {
    Locked locked(lock());
    event.clock = marked(stream);
    event.stream = stream;
    event.serial = ++serials;
  }
  event.mark = wall::mark(stream);
  recorder::order("record", stream, event.serial);
}

void wait(int stream, const Event& event) {
  if (event.stream < 0) return;  // never recorded: nothing to wait for, as on CUDA
  {
    Locked locked(lock());
    join(clocks[stream], event.clock);
  }
  wall::wait(stream, event.mark);
  recorder::order("wait", stream, event.serial);
}

void keep_launch_order(bool kept) {
  Locked locked(lock());
  order_kept = kept;
  launched = {};
  wall::forget_order();
}

void launch_collective(int stream) {
  Locked locked(lock());
  if (!order_kept) return;
  join(clocks[stream], launched);
  launched = marked(stream);
  wall::begin_in_order(stream);
}

void host_waits_for(int stream) {
  {
    Locked locked(lock());
    join(host, marked(stream));
  }
  wall::host_waits(wall::mark(stream));
  recorder::order("host waits for stream", stream, 0);
}

void host_waits_for(const Event& event) {
  if (event.stream < 0) return;
  {
    Locked locked(lock());
    join(host, event.clock);
  }
  wall::host_waits(event.mark);
  recorder::order("host waits for event", event.stream, event.serial);
}

void host_waits_for_all() {
  {
    Locked locked(lock());
    for (int stream = 0; stream < kStreams; ++stream) join(host, marked(stream));
  }
  for (int stream = 0; stream < kStreams; ++stream) wall::host_waits(wall::mark(stream));
  recorder::order("host waits for device", 0, 0);
}

}  // namespace simdev
