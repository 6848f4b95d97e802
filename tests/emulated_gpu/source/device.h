// Interface of the emulated GPUs: memory, streams, events, graphs, and the rules that a program must keep.
// libcuda.so.1 implements it; the runtime, NCCL and torch's operators are built on it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define EXPORTED __attribute__((visibility("default")))

namespace EXPORTED emulated {
using Task = std::function<void()>;
struct Stream;
struct Event;
struct Graph;

// The numbers are CUDA's: cudaError and CUresult agree on all of these.
enum Code : int {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILURE = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
  CAPTURED_EVENT = 907,
  CAPTURE_WRONG_THREAD = 908,
};

// -- devices and contexts (devices.cpp) ------------------------------------------------------------
int device_count();
int current_device();  // of this thread
Code set_device(int device);
bool has_context();  // whether this thread has used a device
void use_context();  // give this thread a context on its current device, if it has none
void clear_context();
bool is_active(int device);
const unsigned char* uuid(int device);  // 16 bytes
int attribute(int number, int device);  // a CUdevice_attribute
uint64_t total_memory();
uint64_t free_memory(int device);

// -- errors and violations (devices.cpp) -----------------------------------------------------------
void fail_device(int device, Code code);  // sticky, as after a kernel's illegal access
Code device_error(int device);
Code set_last(Code code);  // note a thread's last error and return it
Code take_last();
Code peek_last();
const char* name_of(int code);
const char* text_of(int code);
[[gnu::format(printf, 1, 2)]] void say(const char* format, ...);      // one line on stderr
[[gnu::format(printf, 1, 2)]] void violation(const char* format, ...);  // a rule was broken: the test fails
bool traces();

// -- memory (memory.cpp) ---------------------------------------------------------------------------
// The host cannot read a device address; bytes_at() says where its bytes are.
enum class Kind { Unknown, Host, Device };
enum class Use { Read, Write, Scattered };  // Scattered: some of the bytes only, so that others may use those between
struct Range {
  const void* start;
  size_t size;
  Use use = Use::Read;
};
Code allocate(void** out, size_t size);
Code release(void* pointer);
Code allocate_host(void** out, size_t size);
Code release_host(void* pointer);
void register_host(void* pointer, size_t size);
void unregister_host(void* pointer);
Kind kind_of(const void* pointer, int* device = nullptr, void** base = nullptr, size_t* size = nullptr);
bool is_allocated(const void* pointer, size_t size);  // lies inside one allocation
void* bytes_at(const void* pointer);
Code copy(void* to, const void* from, size_t size, Stream* stream, bool blocks);
Code fill(void* to, int value, size_t size, Stream* stream, bool blocks);

// torch's allocator handed memory out on a stream, or took it back so that later work on the stream may get it
void memory_handed_out(const void* pointer, size_t size);
void memory_taken_back(const void* pointer, size_t size, void* stream, int device);

// -- streams and events (streams.cpp) --------------------------------------------------------------
Stream* stream_of(void* handle);  // null stands for the current device's default stream
Stream* create_stream(unsigned flags, int priority);
Code destroy_stream(Stream*);
// Queue a task; `touched` is the device memory that it reads or writes, `what` its name.
Code enqueue(Stream*, Task, const std::vector<Range>& touched = {}, const char* what = "");
Code query(Stream*);
Code synchronize(Stream*);
Code synchronize_device(int device);
int device_of(Stream*);
unsigned flags_of(Stream*);
int priority_of(Stream*);
uint64_t id_of(Stream*);

Event* create_event(unsigned flags);
Code destroy_event(Event*);
Code record(Event*, Stream*);
Code query(Event*);
Code synchronize(Event*);
Code wait(Stream*, Event*);
Code elapsed(float* milliseconds, Event*, Event*);
void follow(Stream* later, Stream* earlier);  // later's next task runs after what earlier holds now

// -- graphs (graphs.cpp) ---------------------------------------------------------------------------
Code begin_capture(Stream*, int mode);
Code end_capture(Stream*, Graph**);
int capture_status(Stream*, uint64_t* id = nullptr, Graph** graph = nullptr);  // 0 none, 1 active, 2 invalidated
int exchange_capture_mode(int mode);
Code check_capture();  // what a call that a capture forbids returns; it invalidates the captures
Code launch(Graph*, Stream*);
size_t count_nodes(Graph*);
void retain(Graph*, Task at_end);
Graph* clone(Graph*);
void destroy(Graph*);
}  // namespace emulated
