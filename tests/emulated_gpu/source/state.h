// What the emulated GPUs consist of: shared by devices.cpp, memory.cpp, streams.cpp and graphs.cpp only.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_set>
#include <vector>

#include "device.h"

namespace emulated {
// Device addresses begin at FIRST_ADDRESS, SPAN for each device; their bytes lie TO_BYTES further.
constexpr uintptr_t FIRST_ADDRESS = 0x100000000000, TO_BYTES = 0x100000000000, SPAN = uintptr_t(1) << 40;

// A vector clock: by a stream's number, how many of its tasks come before. Tasks are ordered only by streams, events
// and the host's waits, so that "this runs after that" is known from the calls, whatever the timing was.
using Clock = std::vector<uint64_t>;
void merge(Clock& into, const Clock& from);
inline uint64_t tasks_of(const Clock& clock, size_t number) { return number < clock.size() ? clock[number] : 0; }

struct Completion {  // what one record of an event stands for
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point at;
  Clock clock;
};

struct Capture {
  uint64_t id;
  int mode;  // 0 global, 1 thread-local, 2 relaxed
  Stream* origin;
  std::thread::id thread;
  Graph* graph;
  std::map<Stream*, std::map<Stream*, size_t>> seen;  // by stream: how many tasks of each stream come before its next
  bool is_invalid = false;
};

struct Device {
  int index = 0;
  unsigned char uuid[16] = {};
  uint64_t used = 0;
  uintptr_t next_address = 0;
  std::map<uintptr_t, size_t> allocations;
  std::multimap<size_t, uintptr_t> gaps;  // addresses of freed allocations, by size
  Stream* default_stream = nullptr;
  std::unordered_set<Stream*> streams;
  std::vector<Stream*> blocking;  // those that the default stream orders itself with
  bool is_active = false;
  std::atomic<int> error{0};
};

struct World {
  std::mutex mutex;  // of devices, host memory, captures and the set of streams
  std::vector<Device*> devices;
  std::map<uintptr_t, size_t> host_memory;
  std::set<Capture*> captures;
  std::atomic<int> capturing{0};
  std::atomic<uint64_t> ids{1};
  std::unordered_set<Stream*> streams;
};
World& world();
inline Device& device_at(int index) { return *world().devices.at(index); }

struct Stream {
  Device* device;
  unsigned flags;
  int priority;
  uint64_t id;
  std::mutex mutex;  // of the queue
  std::condition_variable more, fewer;
  std::deque<Task> queue;
  uint64_t submitted = 0, done = 0;
  bool is_started = false, ends = false;
  Capture* capture = nullptr;
  size_t number = SIZE_MAX;  // its place in clocks
  Clock clock;               // what comes before its next task
};

struct Event {
  unsigned flags;
  std::mutex mutex;
  std::shared_ptr<Completion> completion;  // of the latest record
  Capture* capture = nullptr;
  uint64_t capture_id = 0;
  std::map<Stream*, size_t> seen;
};

struct Graph {
  std::vector<Task> tasks;
  std::vector<std::shared_ptr<void>> held;  // whose deleters run when the last copy of the graph is destroyed
};

extern thread_local int this_thread_device;
extern thread_local bool this_thread_has_context;
void activate(int device);
}  // namespace emulated
