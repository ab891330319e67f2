// The memory of the device: torch's caching allocator, as its CUDA one works, over memory of the host.
//
// [Note: Allocator] Sizes are rounded to 512 bytes. Up to 1 MiB a block comes from a segment of 2 MiB, up to 10 MiB from
// one of 20 MiB, and above that from one of its own, of a multiple of 2 MiB. A block goes back to its stream's free
// blocks, and joins its free neighbours; the best fit is taken next. What `record_stream` says may still use a block
// keeps it until the block's stream, or the host, comes after that use. Whole free segments are given back by
// `empty_cache`, and where a further one would go beyond the limit; it is taken then, whether or not there is room.
// These are the rules of c10/cuda/CUDACachingAllocator.cpp with its default settings.
//
// In virtual mode a large segment is an address range that no access is allowed to.
//
// [Note: Words] In virtual mode small blocks (up to 1 MiB) are real memory, and each knows whether its values are known:
// those that came from the host, and what was computed from known ones alone. So the words that ranks exchange, masks
// and indices are right, while weights are shapes. Whatever is not known reads as 0.
//
// [Note: The host] In virtual mode memory of the host is virtual too, where it is asked for as such: tensors of the device,
// accounted apart. An operator on them is the host's, which no stream runs, and so is the memory that it makes.
#pragma once

#include <c10/core/Allocator.h>

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "accesses.h"
#include "clocks.h"

namespace simdev {

struct Stats {
  int64_t allocated = 0, peak_allocated = 0;  // bytes that were asked for
  int64_t rounded = 0, peak_rounded = 0;      // of blocks in use
  int64_t reserved = 0, peak_reserved = 0;    // of segments
  int64_t blocks = 0, segments = 0;
  int64_t retries = 0;                        // how often segments were given back for lack of room
};

// A part of a segment; free, or one allocation.
struct Block {
  char* address;
  size_t size;
  int stream;
  bool small;
  size_t requested = 0;
  bool allocated = false, pooled = false;
  bool host = false;                 // [Note: The host]
  bool known = false;                // [Note: Words]
  std::bitset<kStreams> used_by{};   // by record_stream
  Block *before = nullptr, *after = nullptr;
  History history{};
};

void set_virtual(bool on);
bool is_virtual();

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* address);

// What this thread allocates meanwhile is the host's.
class InHostMemory {
 public:
  explicit InHostMemory(bool on);
  ~InHostMemory();
  InHostMemory(const InHostMemory&) = delete;

 private:
  bool before_;
};

Block* block_at(const void* address);  // of which this is the first byte, and which is in use or pinned; or none
void use_on_stream(const void* address, int stream);

Stats memory_stats(bool host);
void reset_peaks();
void empty_cache();
void limit_memory(int64_t bytes);  // of the device; 0: none

}  // namespace simdev
