// Devices, contexts, errors, and the list of violations that the tests read.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "state.h"

namespace emulated {
thread_local int this_thread_device = 0;
thread_local bool this_thread_has_context = false;

namespace {
thread_local int last_error = 0;
std::mutex violations_mutex;
std::string violations;
std::atomic<int> own_device{-1};  // the only one that may get a context; -1: any

std::vector<int> visible_devices() {
  const char* count = getenv("EMULATED_GPU_COUNT");
  int physical = count ? atoi(count) : 4;
  std::vector<int> seen;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < physical; i++) seen.push_back(i);
    return seen;
  }
  while (*visible) {
    char* end;
    long index = strtol(visible, &end, 10);
    if (end == visible || index < 0 || index >= physical) break;  // as CUDA does: what follows is not seen either
    seen.push_back(int(index));
    visible = *end == ',' ? end + 1 : end;
  }
  return seen;
}

World* make_world() {
  auto* made = new World;  // never destroyed: streams outlive main
  std::vector<int> seen = visible_devices();
  for (size_t i = 0; i < seen.size(); i++) {
    auto* device = new Device;
    device->index = int(i);
    memcpy(device->uuid, "emulated gpu  \0", 16);
    device->uuid[15] = (unsigned char)(seen[i] + 1);
    auto base = (void*)(FIRST_ADDRESS + i * SPAN);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (mmap(base, SPAN, PROT_NONE, flags, -1, 0) != base) {
      say("cannot reserve the addresses of device %zu", i);
      abort();
    }
    device->next_address = uintptr_t(base) + (2 << 20);
    device->default_stream = new Stream{device, 0, 0, made->ids++};
    device->streams.insert(device->default_stream);
    made->streams.insert(device->default_stream);
    made->devices.push_back(device);
  }
  return made;
}
}  // namespace

World& world() {
  static World* made = make_world();
  return *made;
}

int device_count() { return int(world().devices.size()); }
int current_device() { return this_thread_device; }

void activate(int device) {
  Device& each = device_at(device);
  if (each.is_active) return;
  each.is_active = true;
  if (traces()) say("a context is made on device %d", device);
  int own = own_device.load();
  if (own >= 0 && own != device)
    violation("thread %ld of process %d made a context on device %d, and the process's own device is %d",
              syscall(SYS_gettid), int(getpid()), device, own);
}
void use_context() {
  if (this_thread_has_context || !device_count()) return;
  this_thread_has_context = true;
  activate(this_thread_device);
}
Code set_device(int device) {
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  this_thread_device = device;
  this_thread_has_context = true;
  activate(device);  // cudaSetDevice makes the context, since CUDA 12
  return OK;
}
bool has_context() { return this_thread_has_context; }
void clear_context() { this_thread_has_context = false; }
bool is_active(int device) { return device_at(device).is_active; }
const unsigned char* uuid(int device) { return device_at(device).uuid; }

int attribute(int number, int device) {
  switch (number) {
    case 1: case 2: case 3: return 1024;    // threads a block, and its x and y
    case 4: return 64;                      // z
    case 5: return 2147483647;              // the grid's x
    case 6: case 7: return 65535;           // y and z
    case 8: return 49152;                   // shared memory a block
    case 10: return 32;                     // threads a warp
    case 12: return 65536;                  // registers a block
    case 13: return 1000000;                // kHz
    case 16: return 4;                      // multiprocessors
    case 31: case 41: return 1;             // concurrent kernels, unified addressing
    case 33: return device + 1;             // PCI bus
    case 39: return 2048;                   // threads a multiprocessor
    case 40: return 2;                      // copy engines
    case 75: return 9;                      // compute capability 9.0
    case 81: case 97: return 65536;         // shared memory a multiprocessor, and a block that asks for it
    default: return 0;
  }
}
uint64_t total_memory() {
  static uint64_t total = [] {
    const char* given = getenv("EMULATED_GPU_MEMORY_MB");
    return uint64_t(given ? strtoull(given, nullptr, 10) : 8192) << 20;
  }();
  return total;
}
uint64_t free_memory(int device) { return total_memory() - device_at(device).used; }

// -- errors ----------------------------------------------------------------------------------------
void fail_device(int device, Code code) { device_at(device).error = code; }
Code device_error(int device) { return Code(device_at(device).error.load()); }
Code set_last(Code code) {
  if (code && code != NOT_READY) last_error = code;
  return code;
}
Code take_last() {
  Code code = Code(last_error);
  last_error = 0;
  return code;
}
Code peek_last() { return Code(last_error); }
const char* name_of(int code) {
  switch (code) {
    case OK: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_READY: return "cudaErrorNotReady";
    case ILLEGAL_ADDRESS: return "cudaErrorIllegalAddress";
    case LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    case NOT_SUPPORTED: return "cudaErrorNotSupported";
    case CAPTURE_UNSUPPORTED: return "cudaErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "cudaErrorStreamCaptureInvalidated";
    case CAPTURE_UNMATCHED: return "cudaErrorStreamCaptureUnmatched";
    case CAPTURE_UNJOINED: return "cudaErrorStreamCaptureUnjoined";
    case CAPTURE_ISOLATION: return "cudaErrorStreamCaptureIsolation";
    case CAPTURED_EVENT: return "cudaErrorCapturedEvent";
    case CAPTURE_WRONG_THREAD: return "cudaErrorStreamCaptureWrongThread";
    default: return "cudaErrorUnknown";
  }
}
const char* text_of(int code) {
  if (code == CAPTURED_EVENT) return "operation not permitted on an event last recorded in a capturing stream";
  return code == NOT_SUPPORTED ? "operation not supported (by the emulated GPU)" : name_of(code);
}

static int write_line(const char* format, va_list arguments, char* line, size_t size) {
  int length = snprintf(line, size, "emulated GPU[%d]: ", int(getpid()));
  length += vsnprintf(line + length, size - length - 1, format, arguments);
  length = std::min(length, int(size) - 2);
  line[length] = '\n';
  line[length + 1] = 0;
  return write(2, line, length + 1) < 0 ? 0 : length;
}
void say(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments, line, sizeof line);
  va_end(arguments);
}
void violation(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments, line, sizeof line);
  va_end(arguments);
  std::lock_guard<std::mutex> lock(violations_mutex);
  if (violations.size() < (1 << 16)) violations += line;
}
bool traces() {
  static bool on = getenv("EMULATED_GPU_TRACE") != nullptr;
  return on;
}
}  // namespace emulated

// -- what Python calls, by ctypes ------------------------------------------------------------------
extern "C" {
EXPORTED int emulated_gpu_missing(const char* name) {  // an entry point that nobody wrote
  emulated::say("%s is not emulated", name);
  return emulated::NOT_SUPPORTED;
}
EXPORTED void emulated_gpu_fail(int device, int code) { emulated::fail_device(device, emulated::Code(code)); }
EXPORTED void emulated_gpu_own_device(int device) { emulated::own_device = device; }
EXPORTED int emulated_gpu_is_active(int device) { return emulated::is_active(device); }
EXPORTED size_t emulated_gpu_take_violations(char* out, size_t size) {  // returns the length of all
  std::lock_guard<std::mutex> lock(emulated::violations_mutex);
  size_t length = std::min(size - 1, emulated::violations.size());
  memcpy(out, emulated::violations.data(), length);
  out[length] = 0;
  emulated::violations.clear();
  return length;
}
}
