// Stream capture and graphs: the three modes, the calls that a capture forbids, and streams that never join.
#include <algorithm>

#include "state.h"

namespace emulated {
static thread_local int capture_mode = 0;  // what this thread's calls may invalidate; 0 global

Code begin_capture(Stream* stream, int mode) {
  std::lock_guard<std::mutex> lock(world().mutex);
  if (stream == stream->device->default_stream) return CAPTURE_UNSUPPORTED;
  if (stream->capture) return INVALID_VALUE;
  auto* capture = new Capture{world().ids++, mode, stream, std::this_thread::get_id(), new Graph};
  stream->capture = capture;
  capture->seen[stream];
  world().captures.insert(capture);
  world().capturing++;
  return OK;
}

Code end_capture(Stream* stream, Graph** out) {
  std::lock_guard<std::mutex> lock(world().mutex);
  *out = nullptr;
  Capture* capture = stream->capture;
  if (!capture || capture->origin != stream) return CAPTURE_UNMATCHED;
  if (capture->mode != 2 && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  Code result = capture->is_invalid ? CAPTURE_INVALIDATED : OK;
  if (!result)
    for (auto& [each, seen] : capture->seen)
      if (each != stream && capture->seen[stream][each] < seen[each]) result = CAPTURE_UNJOINED;
  if (result == CAPTURE_UNJOINED)
    violation("a capture ended while a stream that had joined it was not joined back to stream %llu",
              (unsigned long long)stream->id);
  for (auto& [each, seen] : capture->seen) each->capture = nullptr;
  for (Stream* each : world().streams)
    if (each->capture == capture) each->capture = nullptr;
  world().captures.erase(capture);
  world().capturing--;
  if (result)
    delete capture->graph;
  else
    *out = capture->graph;
  delete capture;
  return result;
}

int capture_status(Stream* stream, uint64_t* id, Graph** graph) {
  if (!world().capturing.load()) return 0;
  std::lock_guard<std::mutex> lock(world().mutex);
  if (!stream || !stream->capture) return 0;
  if (id) *id = stream->capture->id;
  if (graph) *graph = stream->capture->graph;
  return stream->capture->is_invalid ? 2 : 1;
}

int exchange_capture_mode(int mode) {
  std::swap(mode, capture_mode);
  return mode;
}

Code check_capture() {
  if (!world().capturing.load() || capture_mode == 2) return OK;
  std::lock_guard<std::mutex> lock(world().mutex);
  Code result = OK;
  for (Capture* capture : world().captures) {
    bool is_mine = capture->thread == std::this_thread::get_id();
    if (capture->mode == 2 || (!is_mine && (capture_mode == 1 || capture->mode == 1))) continue;
    capture->is_invalid = true;
    result = CAPTURE_UNSUPPORTED;
  }
  return result;
}

Code launch(Graph* graph, Stream* stream) {
  auto tasks = std::make_shared<std::vector<Task>>(graph->tasks);
  return enqueue(stream, [tasks] {
    for (Task& task : *tasks) task();
  });
}
size_t count_nodes(Graph* graph) { return graph->tasks.size(); }
void retain(Graph* graph, Task at_end) {
  graph->held.push_back(std::shared_ptr<void>(nullptr, [at_end](void*) { at_end(); }));
}
Graph* clone(Graph* graph) {
  auto* made = new Graph;
  made->tasks = graph->tasks;
  made->held = graph->held;
  return made;
}
void destroy(Graph* graph) { delete graph; }
}  // namespace emulated
