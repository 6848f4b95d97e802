// Streams and events: each stream is a thread, and nothing but CUDA's calls orders them.
//
// Beside the threads, vector clocks keep which task comes after which by those calls alone. With them a use of memory
// that torch's allocator has taken back is found whether or not this run's timing made it show.
#include <unistd.h>

#include <algorithm>

#include "state.h"

namespace emulated {
namespace {
struct Access {  // device memory that a queued task uses
  uintptr_t begin, end;
  size_t stream;
  uint64_t task;
  const char* what;
  Use use;
};
std::mutex order;  // of all clocks, of accesses and of free memory
Clock host;        // what the host has seen the end of
std::vector<Access> accesses;
size_t prune_at = 1024;
std::map<uintptr_t, uintptr_t> taken_back;  // memory that torch's allocator holds for later: begin, end
size_t streams_used = 0;

void serve(Stream* stream) {
  this_thread_device = stream->device->index;
  this_thread_has_context = true;
  std::unique_lock<std::mutex> lock(stream->mutex);
  for (;;) {
    stream->more.wait(lock, [&] { return !stream->queue.empty() || stream->ends; });
    if (stream->queue.empty()) return;
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    lock.unlock();
    if (!stream->device->error.load()) task();
    task = nullptr;
    lock.lock();
    stream->done++;
    stream->fewer.notify_all();
  }
}

// The caller holds `order`, so that a stream's clock and its queue agree.
void push(Stream* stream, Task task) {
  if (stream->number == SIZE_MAX) stream->number = streams_used++;
  if (stream->clock.size() <= stream->number) stream->clock.resize(stream->number + 1);
  stream->clock[stream->number]++;
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (!stream->is_started) {
    stream->is_started = true;
    std::thread(serve, stream).detach();
  }
  stream->queue.push_back(std::move(task));
  stream->submitted++;
  stream->more.notify_one();
}

bool is_idle(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->done == stream->submitted;
}

void drain(Stream* stream) {
  Clock until;
  uint64_t count;
  {
    std::lock_guard<std::mutex> guard(order);
    until = stream->clock;
    std::lock_guard<std::mutex> lock(stream->mutex);
    count = stream->submitted;
  }
  {
    std::unique_lock<std::mutex> lock(stream->mutex);
    stream->fewer.wait(lock, [&] { return stream->done >= count; });
  }
  std::lock_guard<std::mutex> guard(order);
  merge(host, until);
}

void complete(const std::shared_ptr<Completion>& completion) {
  std::lock_guard<std::mutex> lock(completion->mutex);
  completion->done = true;
  completion->at = std::chrono::steady_clock::now();
  completion->changed.notify_all();
}
void await(const std::shared_ptr<Completion>& completion) {
  std::unique_lock<std::mutex> lock(completion->mutex);
  completion->changed.wait(lock, [&] { return completion->done; });
}

// The caller holds `order`.
void push_wait(Stream* later, Stream* earlier) {
  if (!is_idle(earlier)) {
    auto completion = std::make_shared<Completion>();
    push(earlier, [completion] { complete(completion); });
    push(later, [completion] { await(completion); });
  }
  merge(later->clock, earlier->clock);
}

// The default stream comes after, and before, the streams that were not made "non-blocking".
void order_with_default(Stream* stream) {
  Device& device = *stream->device;
  if (stream == device.default_stream)
    for (Stream* each : device.blocking) push_wait(stream, each);
  else if (!(stream->flags & 1))
    push_wait(stream, device.default_stream);
}

bool overlaps(uintptr_t begin, uintptr_t end, const Access& access) {
  return access.begin < end && begin < access.end;
}
// Whether the next task of a stream comes after an access. The caller holds `order`.
bool is_after(const Stream* stream, const Access& access) {
  return access.stream == stream->number || access.task <= tasks_of(stream->clock, access.stream) ||
         access.task <= tasks_of(host, access.stream);
}
// The caller holds `order`.
void check_race(Stream* stream, const Access& mine) {
  for (const Access& each : accesses) {
    if (each.use == Use::Scattered || mine.use == Use::Scattered) continue;
    if (each.use == Use::Read && mine.use == Use::Read) continue;
    if (!overlaps(mine.begin, mine.end, each) || is_after(stream, each)) continue;
    const char* done[] = {"reads", "writes"};
    violation("%s %s memory at %p on stream %llu, which %s %s on another stream: nothing orders the two", mine.what,
              done[int(mine.use)], (void*)mine.begin, (unsigned long long)stream->id, each.what, done[int(each.use)]);
    break;
  }
}

// The caller holds `order`.
void note_accesses(Stream* stream, const std::vector<Range>& touched, const char* what) {
  for (const Range& range : touched) {
    auto begin = uintptr_t(range.start), end = begin + range.size;
    if (begin < FIRST_ADDRESS || begin >= FIRST_ADDRESS + TO_BYTES || !range.size) continue;
    auto free = taken_back.upper_bound(begin);
    if (free != taken_back.begin() && std::prev(free)->second > begin)
      violation("%s begins on stream %llu and uses %zu bytes at %p, which torch's allocator has taken back", what,
                (unsigned long long)stream->id, range.size, range.start);
    Access access{begin, end, stream->number, stream->clock[stream->number], what, range.use};
    check_race(stream, access);
    accesses.push_back(access);
  }
  if (accesses.size() < prune_at) return;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [](const Access& each) { return each.task <= tasks_of(host, each.stream); }),
                 accesses.end());
  prune_at = std::max<size_t>(1024, 2 * accesses.size());
}
}  // namespace

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

// -- memory that torch's allocator takes back ------------------------------------------------------
void memory_handed_out(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> guard(order);
  auto begin = uintptr_t(pointer), end = begin + size;
  auto each = taken_back.upper_bound(begin);
  if (each != taken_back.begin()) --each;
  while (each != taken_back.end() && each->first < end) {
    auto [start, stop] = *each;
    if (stop <= begin) {
      ++each;
      continue;
    }
    each = taken_back.erase(each);
    if (start < begin) taken_back[start] = begin;
    if (stop > end) taken_back[end] = stop;
  }
}
void memory_taken_back(const void* pointer, size_t size, void* handle, int device) {
  auto* stream = handle ? (Stream*)handle : device_at(device).default_stream;
  std::lock_guard<std::mutex> guard(order);
  auto begin = uintptr_t(pointer), end = begin + size;
  for (const Access& each : accesses) {
    if (!overlaps(begin, end, each) || is_after(stream, each)) continue;
    violation("memory at %p (%zu bytes) was given back to stream %llu while %s on another stream may still use it: "
              "nothing orders that stream before this one",
              pointer, size, (unsigned long long)stream->id, each.what);
    break;
  }
  taken_back[begin] = end;
}

// -- streams ---------------------------------------------------------------------------------------
Stream* stream_of(void* handle) {
  use_context();
  if (uintptr_t(handle) <= 2) return device_at(current_device()).default_stream;
  std::lock_guard<std::mutex> lock(world().mutex);
  return world().streams.count((Stream*)handle) ? (Stream*)handle : nullptr;
}
Stream* create_stream(unsigned flags, int priority) {
  use_context();
  std::lock_guard<std::mutex> guard(order);
  std::lock_guard<std::mutex> lock(world().mutex);
  auto* stream = new Stream{&device_at(current_device()), flags, priority, world().ids++};
  stream->device->streams.insert(stream);
  if (!(flags & 1)) stream->device->blocking.push_back(stream);
  world().streams.insert(stream);
  return stream;
}
Code destroy_stream(Stream* stream) {
  std::lock_guard<std::mutex> guard(order);
  std::lock_guard<std::mutex> lock(world().mutex);
  auto& blocking = stream->device->blocking;
  blocking.erase(std::remove(blocking.begin(), blocking.end(), stream), blocking.end());
  stream->device->streams.erase(stream);
  world().streams.erase(stream);
  std::lock_guard<std::mutex> queue_lock(stream->mutex);
  stream->ends = true;  // after what is queued; the object stays, because a graph or an event may name it
  stream->more.notify_one();
  return OK;
}
Code enqueue(Stream* stream, Task task, const std::vector<Range>& touched, const char* what) {
  if (!stream) return INVALID_HANDLE;
  if (Code code = device_error(stream->device->index)) return code;
  if (world().capturing.load()) {
    std::lock_guard<std::mutex> lock(world().mutex);
    if (Capture* capture = stream->capture) {
      if (capture->is_invalid) return CAPTURE_INVALIDATED;
      capture->graph->tasks.push_back(std::move(task));
      capture->seen[stream][stream]++;
      return OK;
    }
  }
  std::lock_guard<std::mutex> guard(order);
  order_with_default(stream);
  push(stream, std::move(task));
  note_accesses(stream, touched, what);
  return OK;
}
void follow(Stream* later, Stream* earlier) {
  std::lock_guard<std::mutex> guard(order);
  push_wait(later, earlier);
}
Code query(Stream* stream) {
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) {
    check_capture();
    return CAPTURE_UNSUPPORTED;
  }
  if (Code code = check_capture()) return code;
  if (Code code = device_error(stream->device->index)) return code;
  std::lock_guard<std::mutex> guard(order);
  if (!is_idle(stream)) return NOT_READY;
  merge(host, stream->clock);
  return OK;
}
Code synchronize(Stream* stream) {
  if (!stream) return INVALID_HANDLE;
  if (stream->capture) {
    std::lock_guard<std::mutex> lock(world().mutex);
    if (stream->capture) stream->capture->is_invalid = true;
    return CAPTURE_UNSUPPORTED;
  }
  if (Code code = check_capture()) return code;
  if (stream == stream->device->default_stream) {  // which comes after the others too
    std::lock_guard<std::mutex> guard(order);
    order_with_default(stream);
  }
  drain(stream);
  return device_error(stream->device->index);
}
Code synchronize_device(int device) {
  if (Code code = check_capture()) return code;
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    all.assign(device_at(device).streams.begin(), device_at(device).streams.end());
  }
  for (Stream* stream : all) drain(stream);
  return device_error(device);
}
int device_of(Stream* stream) { return stream->device->index; }
unsigned flags_of(Stream* stream) { return stream->flags; }
int priority_of(Stream* stream) { return stream->priority; }
uint64_t id_of(Stream* stream) { return stream->id; }

// -- events ----------------------------------------------------------------------------------------
Event* create_event(unsigned flags) {
  use_context();
  auto* event = new Event;
  event->flags = flags;
  return event;
}
Code destroy_event(Event* event) {
  delete event;
  return OK;
}
Code record(Event* event, Stream* stream) {
  if (!event || !stream) return INVALID_HANDLE;
  if (Code code = device_error(stream->device->index)) return code;
  if (world().capturing.load()) {
    std::lock_guard<std::mutex> lock(world().mutex);
    if (Capture* capture = stream->capture) {
      if (capture->is_invalid) return CAPTURE_INVALIDATED;
      std::lock_guard<std::mutex> event_lock(event->mutex);
      event->capture = capture;
      event->capture_id = capture->id;
      event->seen = capture->seen[stream];
      return OK;
    }
  }
  auto completion = std::make_shared<Completion>();
  std::lock_guard<std::mutex> guard(order);
  order_with_default(stream);
  push(stream, [completion] { complete(completion); });
  completion->clock = stream->clock;
  std::lock_guard<std::mutex> event_lock(event->mutex);
  event->completion = completion;
  event->capture = nullptr;
  return OK;
}
Code query(Event* event) {
  use_context();
  if (Code code = check_capture()) return code;
  std::shared_ptr<Completion> completion;
  {
    std::lock_guard<std::mutex> event_lock(event->mutex);
    if (event->capture) return CAPTURED_EVENT;
    completion = event->completion;
  }
  if (Code code = device_error(current_device())) return code;
  if (!completion) return OK;
  {
    std::lock_guard<std::mutex> lock(completion->mutex);
    if (!completion->done) return NOT_READY;
  }
  std::lock_guard<std::mutex> guard(order);
  merge(host, completion->clock);
  return OK;
}
Code synchronize(Event* event) {
  use_context();
  if (Code code = check_capture()) return code;
  std::shared_ptr<Completion> completion;
  {
    std::lock_guard<std::mutex> event_lock(event->mutex);
    if (event->capture) return CAPTURED_EVENT;
    completion = event->completion;
  }
  if (!completion) return OK;
  await(completion);
  std::lock_guard<std::mutex> guard(order);
  merge(host, completion->clock);
  return OK;
}
Code wait(Stream* stream, Event* event) {
  if (!event || !stream) return INVALID_HANDLE;
  std::shared_ptr<Completion> completion;
  {
    std::lock_guard<std::mutex> lock(world().mutex);
    std::lock_guard<std::mutex> event_lock(event->mutex);
    if (Capture* capture = event->capture) {
      // the event is of a capture that has ended
      if (!world().captures.count(capture) || capture->id != event->capture_id) return INVALID_VALUE;
      if (stream->capture && stream->capture != capture) return CAPTURE_UNSUPPORTED;
      stream->capture = capture;  // joins it
      for (auto& [each, count] : event->seen) {
        size_t& mine = capture->seen[stream][each];
        mine = std::max(mine, count);
      }
      return OK;
    }
    completion = event->completion;
    if (stream->capture && completion) {  // work from before the capture
      stream->capture->is_invalid = true;
      return CAPTURE_ISOLATION;
    }
  }
  if (!completion) return OK;
  std::lock_guard<std::mutex> guard(order);
  push(stream, [completion] { await(completion); });
  merge(stream->clock, completion->clock);
  return OK;
}
Code elapsed(float* milliseconds, Event* first, Event* second) {
  if (!first->completion || !second->completion) return INVALID_HANDLE;
  if (query(first) || query(second)) return NOT_READY;
  std::chrono::duration<float, std::milli> between = second->completion->at - first->completion->at;
  *milliseconds = between.count();
  return OK;
}
}  // namespace emulated
