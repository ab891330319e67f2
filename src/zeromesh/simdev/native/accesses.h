// Every access of every kernel, held against the clocks of streams: [Note: Clocks].
//
// A race is an access that nothing orders after an earlier one of the same bytes on another stream, where one of the two
// writes. That a block is allocated counts as a write on the stream that it is for: what this stream did with the same
// memory before may still be under way. An early free is a block that goes back to its stream's free blocks before this
// stream comes after the accesses of all others: the next tensor there would be written over.
//
// Pinned memory of the host is held against the same clocks. Operators of the host touch it too, each at once: they race
// with device accesses that the host has not waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace simdev {

struct Block;

constexpr int kHost = -1;  // in the place of a stream

struct Access {
  int stream;
  int64_t time;
  bool writes;
  uint32_t what, where;  // interned: the operation, and the caller's file and line
};

// What was done to a block, by range of bytes.
using History = std::map<std::pair<size_t, size_t>, std::vector<Access>>;

// A range of bytes of a block that a kernel touches.
struct Touch {
  Block* block;
  size_t begin, end;
  bool writes;
};

// One thing found, in words and numbers; Python makes values of it.
struct Finding {
  std::string what, where, other, other_where;
  int stream = 0, other_stream = 0;
  bool writes = false, other_writes = false;
  int64_t bytes = 0;
  std::vector<std::string> stack{};
};

namespace checker {

extern bool on;

// Callers in these directories are passed over: "where" is the first line outside of them.
void set_passed_over(std::vector<std::string> directories);

// "file:line" of the Python code that calls; empty while nothing is checked. It takes the interpreter's lock: never call
// it with the device's.
std::string caller();

void start();
void stop();
void access(const std::string& what, const std::vector<Touch>& touches, int stream);  // or kHost
void allocated(Block& block);
void freed(Block& block, const std::string& where);
void watch_host(bool on);  // operators of the host on pinned memory
void host_read(const std::string& what, int stream, int64_t bytes);
void host_wait(const std::string& what, int stream);

const std::vector<Finding>& races();
const std::vector<Finding>& early_frees();
const std::vector<Finding>& host_reads();
const std::vector<Finding>& host_waits();
int64_t checked();

}  // namespace checker
}  // namespace simdev
