#include "wall.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "clocks.h"

namespace simdev::wall {

struct Mark {
  bool known = false;
  double at = 0;
};

namespace {

using Lock = std::unique_lock<std::mutex>;

// An entry of a stream: a job, a mark to wait for, a mark that is reached, or else a kernel.
struct Item {
  double issued;
  double seconds = 0;
  std::function<void()> job{};
  MarkPtr awaited{}, reached{};
};

struct Stream {
  std::deque<Item> queue{};
  double free = 0;  // when everything that has left the queue is done
  bool working = false, has_thread = false;
  std::condition_variable work{};
};

struct Device {
  std::mutex mutex{};
  std::condition_variable changed{};
  std::array<Stream, kStreams> streams{};
  std::array<std::mutex, 2> host_link{};
  MarkPtr begun{};  // of the last launched collective, if their order is kept
  std::exception_ptr failure{};
  Rates rates{};
};

Device* device = nullptr;  // never destroyed: threads may outlive everything else

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void sleep_until(double at) {
  const double left = at - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

// Whether the stream passes its first item. Starts a job.
bool passes(Stream& stream, Item& item) {
  const double begin = std::max(stream.free, item.issued);
  if (item.job) {
    stream.working = true, stream.free = begin;
    stream.work.notify_one();
    return false;
  }
  if (item.awaited && !item.awaited->known) return false;
  stream.free = item.awaited ? std::max(begin, item.awaited->at) : begin + item.seconds;
  if (item.reached) *item.reached = {true, begin};
  return true;
}

// Moves all streams on: progress of one may let another go on.
void settle() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& stream : device->streams) {
      while (!stream.queue.empty() && !stream.working && passes(stream, stream.queue.front())) {
        stream.queue.pop_front();
        moved = true;
      }
    }
  }
  device->changed.notify_all();
}

void work(Stream& stream) {
  Lock locked(device->mutex);
  while (true) {
    stream.work.wait(locked, [&] { return stream.working; });
    auto job = std::move(stream.queue.front().job);
    locked.unlock();
    sleep_until(stream.free);
    std::exception_ptr failure;
    try {
      job();
    } catch (...) {
      failure = std::current_exception();
    }
    job = nullptr;
    locked.lock();
    if (failure && !device->failure) device->failure = failure;
    stream.free = now(), stream.working = false;
    stream.queue.pop_front();
    settle();
  }
}

void put(int number, Item item) {
  Lock locked(device->mutex);
  Stream& stream = device->streams[number];
  if (item.job && !stream.has_thread) {
    stream.has_thread = true;
    std::thread(work, std::ref(stream)).detach();
  }
  item.issued = now();
  stream.queue.push_back(std::move(item));
  if (stream.queue.size() == 1) settle();
}

}  // namespace

void start(const Rates& rates) {
  device = new Device;
  device->rates = rates;
}

bool on() { return device != nullptr; }

void kernel(int stream, double flops, double bytes) {
  if (!on()) return;
  const auto& rates = device->rates;
  put(stream, {.issued = 0, .seconds = (flops > 0 ? flops / rates.flops : bytes / rates.memory) * rates.dilation});
}

void copy(int stream, bool up, int64_t bytes) {
  if (!on()) return;
  const double seconds = static_cast<double>(bytes) / device->rates.host_copy * device->rates.dilation;
  run(stream, [seconds, up] {
    std::lock_guard<std::mutex> lane(device->host_link[up]);
    sleep_until(now() + seconds);
  });
}

void host_works(double bytes) {
  if (on()) sleep_until(now() + bytes / device->rates.host_memory * device->rates.dilation);
}

void run(int stream, std::function<void()> job) { put(stream, {.issued = 0, .job = std::move(job)}); }

MarkPtr mark(int stream) {
  if (!on()) return nullptr;
  auto made = std::make_shared<Mark>();
  put(stream, {.issued = 0, .reached = made});
  return made;
}

void wait(int stream, const MarkPtr& mark) {
  if (mark) put(stream, {.issued = 0, .awaited = mark});
}

void begin_in_order(int stream) {
  if (!on()) return;
  wait(stream, device->begun);
  device->begun = mark(stream);
}

void forget_order() {
  if (on()) device->begun = nullptr;
}

bool is_over(const MarkPtr& mark) {
  if (!mark) return true;
  Lock locked(device->mutex);
  return mark->known && mark->at <= now();
}

void host_waits(const MarkPtr& mark) {
  if (!mark) return;
  {
    Lock locked(device->mutex);
    device->changed.wait(locked, [&] { return mark->known || device->failure; });
    if (device->failure) std::rethrow_exception(device->failure);
  }
  sleep_until(mark->at);
}

double seconds_between(const MarkPtr& from, const MarkPtr& to) {
  return from && to ? (to->at - from->at) / device->rates.dilation : 0;
}

}  // namespace simdev::wall
