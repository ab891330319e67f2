#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

namespace simdev {
namespace {

constexpr size_t kRounding = 512;
constexpr size_t kSmall = 1 << 20;           // largest block of a small segment
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kLargeSegment = 20 << 20;
constexpr size_t kOwnSegment = 10 << 20;     // blocks of this size or more get a segment each
constexpr size_t kSegmentRounding = 2 << 20;
constexpr int kPoison = 0xff;                // NaN in every floating dtype, so that unwritten values show

bool virtual_mode = false;

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t segment_size(size_t size) {
  if (size <= kSmall) return kSmallSegment;
  return size < kOwnSegment ? kLargeSegment : rounded_up(size, kSegmentRounding);
}

struct BestFit {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->size != b->size ? a->size < b->size : a->address < b->address;
  }
};

// [Note: Allocator]
class Memory {
 public:
  explicit Memory(bool host) : host_(host) {}

  Block* take(size_t bytes) {
    Locked locked(lock());
    release_deferred();
    const size_t size = std::max(kRounding, rounded_up(bytes, kRounding));
    Block* block = free_block(size);
    if (block == nullptr) block = new_segment(size);
    split(block, size);
    block->requested = bytes, block->allocated = true, block->known = false, block->host = host_;
    block->used_by.reset();
    in_use_[block->address] = block;
    count(bytes, size, 1);
    checker::allocated(*block);
    if (!virtual_mode) std::memset(block->address, kPoison, bytes);
    return block;
  }

  void give_back(Block* block) {
    const auto where = checker::caller();
    Locked locked(lock());
    checker::freed(*block, where);
    in_use_.erase(block->address);
    count(-static_cast<int64_t>(block->requested), -static_cast<int64_t>(block->size), -1);
    if (block->used_by.none()) return release(block);
    Clock until{};
    for (int stream = 0; stream < kStreams; ++stream)
      if (block->used_by[stream]) until[stream] = marked(stream)[stream];
    deferred_.emplace_back(block, until);
  }

  Block* in_use(const void* address) {
    Locked locked(lock());
    const auto entry = in_use_.find(address);
    return entry == in_use_.end() ? nullptr : entry->second;
  }

  void empty() {
    Locked locked(lock());
    release_deferred();
    for (auto* pool : {&small_, &large_}) {
      for (auto entry = pool->begin(); entry != pool->end();) {
        Block* block = *entry;
        if (block->before != nullptr || block->after != nullptr) {
          ++entry;
          continue;
        }
        entry = pool->erase(entry);
        munmap(block->address, block->size);
        stats.reserved -= static_cast<int64_t>(block->size), --stats.segments;
        delete block;
      }
    }
  }

  Stats stats;
  int64_t limit = 0;

 private:
  using Pool = std::set<Block*, BestFit>;

  Pool& pool(const Block* block) { return block->small ? small_ : large_; }

  Block* free_block(size_t size) {
    Block wanted{nullptr, size, current_stream(), size <= kSmall};
    Pool& blocks = pool(&wanted);
    const auto entry = blocks.lower_bound(&wanted);
    if (entry == blocks.end() || (*entry)->stream != wanted.stream) return nullptr;
    return taken_out(*entry);
  }

  Block* new_segment(size_t size) {
    const size_t bytes = segment_size(size);
    if (limit > 0 && stats.reserved + static_cast<int64_t>(bytes) > limit) empty(), ++stats.retries;
    const bool small = size <= kSmall;
    const int access = virtual_mode && !small ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* address = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "the simulated device cannot reserve ", bytes, " bytes: ", std::strerror(errno));
    stats.reserved += static_cast<int64_t>(bytes), ++stats.segments;
    stats.peak_reserved = std::max(stats.peak_reserved, stats.reserved);
    return new Block{static_cast<char*>(address), bytes, current_stream(), small};
  }

  void split(Block* block, size_t size) {
    const size_t left = block->size - size;
    if (block->small ? left < kRounding : left <= kSmall) return;
    auto* rest = new Block{block->address + size, left, block->stream, block->small};
    rest->before = block, rest->after = block->after;
    if (rest->after != nullptr) rest->after->before = rest;
    block->after = rest, block->size = size;
    put(rest);
  }

  void release(Block* block) {
    block->allocated = false;
    if (block->after != nullptr && block->after->pooled) absorb(block, taken_out(block->after));
    if (block->before != nullptr && block->before->pooled) {
      Block* first = taken_out(block->before);
      absorb(first, block);
      block = first;
    }
    put(block);
  }

  void put(Block* block) {
    block->pooled = true;
    pool(block).insert(block);
  }

  Block* taken_out(Block* block) {
    block->pooled = false;
    pool(block).erase(block);
    return block;
  }

  static void absorb(Block* first, Block* second) {
    first->size += second->size, first->after = second->after;
    if (first->after != nullptr) first->after->before = first;
    delete second;
  }

  void release_deferred() {
    auto is_over = [](const std::pair<Block*, Clock>& held) { return covers(now(held.first->stream), held.second); };
    const auto over = std::stable_partition(deferred_.begin(), deferred_.end(), [&](auto& held) { return !is_over(held); });
    std::vector<std::pair<Block*, Clock>> ready(over, deferred_.end());
    deferred_.erase(over, deferred_.end());
    for (auto& [block, clock] : ready) release(block);
  }

  void count(int64_t bytes, int64_t rounded, int64_t blocks) {
    stats.allocated += bytes, stats.rounded += rounded, stats.blocks += blocks;
    stats.peak_allocated = std::max(stats.peak_allocated, stats.allocated);
    stats.peak_rounded = std::max(stats.peak_rounded, stats.rounded);
  }

  const bool host_;
  Pool small_, large_;
  std::unordered_map<const void*, Block*> in_use_;
  std::vector<std::pair<Block*, Clock>> deferred_;  // with the work that must finish before they are used again
};

Memory& memory(bool host) {
  static auto* all = new std::array<Memory, 2>{Memory(false), Memory(true)};  // never destroyed: tensors may outlive all
  return (*all)[host];
}

thread_local bool taking_host_memory = false;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// The allocator in torch's interface, with its figures for torch.accelerator.memory_stats() and the like.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &give_back, kDevice};
    Block* block = memory(taking_host_memory).take(bytes);
    return {block->address, block, &give_back, kDevice};
  }

  static void give_back(void* block) {
    if (block != nullptr) memory(static_cast<Block*>(block)->host).give_back(static_cast<Block*>(block));
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    if (!virtual_mode) default_copy_data(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { memory(false).empty(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    use_on_stream(data.get(), static_cast<int>(stream.id()));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const Stats stats = memory_stats(false);
    c10::CachingDeviceAllocator::DeviceStats out;
    auto fill = [](auto& into, int64_t current, int64_t peak) { into[0].current = current, into[0].peak = peak; };
    fill(out.requested_bytes, stats.allocated, stats.peak_allocated);
    fill(out.allocated_bytes, stats.rounded, stats.peak_rounded);
    fill(out.active_bytes, stats.rounded, stats.peak_rounded);
    fill(out.reserved_bytes, stats.reserved, stats.peak_reserved);
    fill(out.allocation, stats.blocks, stats.blocks);
    fill(out.segment, stats.segments, stats.segments);
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peaks(); }
};

std::unordered_map<const void*, Block>& pinned() {
  static auto* all = new std::unordered_map<const void*, Block>;
  return *all;
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes == 0 ? nullptr : c10::alloc_cpu(bytes);
    Locked locked(lock());
    if (address != nullptr) pinned()[address] = Block{static_cast<char*>(address), bytes, 0, false};
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  static void give_back(void* address) {
    if (address == nullptr) return;
    Locked locked(lock());
    pinned().erase(address);
    c10::free_cpu(address);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

DeviceMemory the_device_memory;
PinnedMemory the_pinned_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_device_memory);

}  // namespace

void set_virtual(bool on) { virtual_mode = on; }
bool is_virtual() { return virtual_mode; }

c10::Allocator* device_memory() { return &the_device_memory; }
c10::Allocator* pinned_memory() { return &the_pinned_memory; }

bool is_pinned(const void* address) {
  Locked locked(lock());
  return pinned().count(address) != 0;
}

InHostMemory::InHostMemory(bool on) : before_(taking_host_memory) { taking_host_memory = on; }
InHostMemory::~InHostMemory() { taking_host_memory = before_; }

Block* block_at(const void* address) {
  Locked locked(lock());
  for (const bool host : {false, true})
    if (Block* block = memory(host).in_use(address)) return block;
  const auto entry = pinned().find(address);
  return entry == pinned().end() ? nullptr : &entry->second;
}

void use_on_stream(const void* address, int stream) {
  Locked locked(lock());
  Block* block = block_at(address);
  if (block != nullptr && block->stream != stream) block->used_by.set(stream);
}

Stats memory_stats(bool host) {
  Locked locked(lock());
  return memory(host).stats;
}

void reset_peaks() {
  Locked locked(lock());
  for (const bool host : {false, true}) {
    auto& stats = memory(host).stats;
    stats.peak_allocated = stats.allocated, stats.peak_rounded = stats.rounded, stats.peak_reserved = stats.reserved;
  }
}

void empty_cache() { memory(false).empty(); }

void limit_memory(int64_t bytes) {
  Locked locked(lock());
  memory(false).limit = bytes;
}

}  // namespace simdev
