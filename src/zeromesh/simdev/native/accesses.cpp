#include "accesses.h"

#include <Python.h>

#include <unordered_map>

#include "clocks.h"
#include "memory.h"

namespace simdev::checker {

bool on = false;

namespace {

struct Names {
  std::vector<std::string> all;
  std::unordered_map<std::string, uint32_t> numbers;

  uint32_t number(const std::string& name) {
    const auto [entry, fresh] = numbers.emplace(name, static_cast<uint32_t>(all.size()));
    if (fresh) all.push_back(name);
    return entry->second;
  }
};

Names names;
std::vector<std::string> passed_over;
std::vector<Finding> found_races, found_frees, found_reads, found_waits;
int64_t accesses = 0;

bool is_passed_over(const std::string& file) {
  if (file.empty() || file[0] == '<') return true;
  for (const auto& directory : passed_over)
    if (file.compare(0, directory.size(), directory) == 0) return true;
  return false;
}

// "file:line" of at most `most` Python callers of this thread, innermost first. Autograd's own threads have none.
std::vector<std::string> callers(size_t most) {
  std::vector<std::string> lines;
  if (!Py_IsInitialized()) return lines;
  const auto state = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && lines.size() < most) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    PyObject* name = code->co_filename;
    const char* text = PyUnicode_AsUTF8(name);
    if (text != nullptr && !is_passed_over(text))
      lines.push_back(std::string(text) + ":" + std::to_string(PyFrame_GetLineNumber(frame)));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(state);
  return lines;
}

}  // namespace

std::string caller() {
  if (!on) return {};
  const auto lines = callers(1);
  return lines.empty() ? "autograd" : lines.front();
}

namespace {

// Whether `before` may still be running when `stream` begins its present operation.
bool is_unordered(const Access& before, int stream, const Clock& clock) {
  return before.stream != stream && clock[before.stream] < before.time;
}

void compare(const Access& access, const Clock& clock, const std::vector<Access>& earlier, int64_t bytes) {
  for (const auto& before : earlier) {
    if (!(access.writes || before.writes) || !is_unordered(before, access.stream, clock)) continue;
    Finding race;
    race.what = names.all[access.what], race.where = names.all[access.where];
    race.other = names.all[before.what], race.other_where = names.all[before.where];
    race.stream = access.stream, race.other_stream = before.stream;
    race.writes = access.writes, race.other_writes = before.writes;
    race.bytes = bytes;
    found_races.push_back(race);
  }
}

// Keeps only a stream's latest read, and latest write, of a range: it implies all earlier ones.
void note(std::vector<Access>& accesses_of_range, const Access& access) {
  for (auto& before : accesses_of_range) {
    if (before.stream == access.stream && before.writes == access.writes) {
      before = access;
      return;
    }
  }
  accesses_of_range.push_back(access);
}

void touch(const Touch& touched, const Access& access, const Clock& clock) {
  ++accesses;
  auto& history = touched.block->history;
  // Ranges are sorted by where they begin: none that begins at `end` or later meets this one.
  for (auto entry = history.begin(); entry != history.end() && entry->first.first < touched.end;) {
    const auto [begin, end] = entry->first;
    if (touched.begin < end) {
      compare(access, clock, entry->second, static_cast<int64_t>(end - begin));
      if (access.writes && touched.begin <= begin && end <= touched.end) {
        entry = history.erase(entry);  // operations after this write are also after the erased accesses
        continue;
      }
    }
    ++entry;
  }
  // The host's own accesses need no entry: everything that is issued later comes after them.
  if (access.stream != kHost) note(history[{touched.begin, touched.end}], access);
}

}  // namespace

void set_passed_over(std::vector<std::string> directories) { passed_over = std::move(directories); }

void start() {
  Locked locked(lock());
  found_races.clear(), found_frees.clear(), found_reads.clear(), found_waits.clear();
  accesses = 0;
  on = true;
  watch_host(true);
}

void stop() {
  watch_host(false);
  on = false;
}

void access(const std::string& what, const std::vector<Touch>& touches, int stream) {
  if (!on || touches.empty()) return;
  const auto where = caller();  // before the lock: another thread may hold the interpreter and want the lock
  Locked locked(lock());
  const Clock& clock = stream == kHost ? host_now() : now(stream);
  const int64_t time = stream == kHost ? 0 : time_of(stream);
  const uint32_t what_number = names.number(what), where_number = names.number(where);
  for (const auto& touched : touches) touch(touched, {stream, time, touched.writes, what_number, where_number}, clock);
}

void allocated(Block& block) {
  block.history.clear();
  if (!on) return;
  const Access access{block.stream, time_of(block.stream), true, names.number("allocation"), names.number("")};
  block.history[{0, block.size}] = {access};
}

void freed(Block& block, const std::string& where) {
  if (!on) return;
  const Clock& clock = now(block.stream);
  for (const auto& [range, accesses_of_range] : block.history) {
    for (const auto& before : accesses_of_range) {
      if (!is_unordered(before, block.stream, clock) || block.used_by[before.stream]) continue;
      Finding early;
      early.what = "free", early.where = where;
      early.other = names.all[before.what], early.other_where = names.all[before.where];
      early.stream = block.stream, early.other_stream = before.stream;
      early.other_writes = before.writes;
      early.bytes = static_cast<int64_t>(block.requested);
      found_frees.push_back(early);
    }
  }
  block.history.clear();
}

namespace {

void note_host(std::vector<Finding>& found, const std::string& what, int stream, int64_t bytes) {
  if (!on) return;
  Finding finding;
  finding.what = what, finding.stream = stream, finding.bytes = bytes;
  finding.stack = callers(64);
  Locked locked(lock());
  found.push_back(finding);
}

}  // namespace

void host_read(const std::string& what, int stream, int64_t bytes) { note_host(found_reads, what, stream, bytes); }
void host_wait(const std::string& what, int stream) { note_host(found_waits, what, stream, 0); }

const std::vector<Finding>& races() { return found_races; }
const std::vector<Finding>& early_frees() { return found_frees; }
const std::vector<Finding>& host_reads() { return found_reads; }
const std::vector<Finding>& host_waits() { return found_waits; }
int64_t checked() { return accesses; }

}  // namespace simdev::checker
