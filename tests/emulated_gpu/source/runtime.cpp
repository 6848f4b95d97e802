// The runtime API of the emulated GPUs: the entry points of libcudart.so.13 that torch's libraries import.
// Device code cannot run: a launch fails with the kernel's name, except torch.cuda._sleep's.
#include <cxxabi.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cuda_types.h"
#include "device.h"

using namespace emulated;
extern "C" void* emulated_gpu_find(const char* name);

namespace {
int noted(Code code) { return set_last(code); }

std::unordered_map<const void*, const char*>& kernels() {
  static auto* made = new std::unordered_map<const void*, const char*>;
  return *made;
}
std::mutex kernels_mutex;

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Launch> launches;

int run_kernel(const void* entry, void** arguments, void* stream) {
  const char* name = "an unknown kernel";
  {
    std::lock_guard<std::mutex> lock(kernels_mutex);
    auto found = kernels().find(entry);
    if (found != kernels().end()) name = found->second;
  }
  if (strstr(name, "spin_kernel")) {  // torch.cuda._sleep: cycles of 1 GHz
    long cycles = *(long*)arguments[0];
    return noted(enqueue(stream_of(stream), [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles)); }));
  }
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  say("kernels do not run on an emulated GPU: %.300s", plain ? plain : name);
  free(plain);
  return noted(NOT_SUPPORTED);
}
}  // namespace

#define API extern "C" EXPORTED int

// kernels
extern "C" EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
extern "C" EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" EXPORTED void __cudaUnregisterFatBinary(void**) {}
extern "C" EXPORTED char __cudaInitModule(void**) { return 1; }
extern "C" EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" EXPORTED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*,
                                                dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  kernels()[host] = name;
}
extern "C" EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  launches.push_back({grid, block, shared_bytes, stream});
  return 0;
}
API __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void** stream) {
  if (launches.empty()) return 52;  // cudaErrorMissingConfiguration
  Launch launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared_bytes = launch.shared_bytes;
  *stream = launch.stream;
  return OK;
}
API __cudaGetKernel(const void** out, const void* entry) {
  *out = entry;
  return OK;
}
API __cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, void* stream) {
  return run_kernel(kernel, arguments, stream);
}
API cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, void* stream) {
  return run_kernel(kernel, arguments, stream);
}
API cudaLaunchKernelExC(const LaunchConfiguration* configuration, const void* kernel, void** arguments) {
  return run_kernel(kernel, arguments, configuration->stream);
}
API cudaFuncGetAttributes(FunctionAttributes* out, const void*) {
  *out = {};
  out->max_threads = 1024;
  out->registers = 32;
  out->ptx_version = out->binary_version = 90;
  return OK;
}
API cudaFuncSetAttribute(const void*, int, int) { return OK; }
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  *out = 1;
  return OK;
}

// devices
API cudaGetDeviceCount(int* out) {
  *out = device_count();
  return noted(*out ? OK : NO_DEVICE);
}
API cudaGetDevice(int* out) {
  *out = current_device();
  return OK;
}
API cudaSetDevice(int device) { return noted(set_device(device)); }
API cudaDriverGetVersion(int* out) {
  *out = 13000;
  return OK;
}
API cudaRuntimeGetVersion(int* out) {
  *out = 13000;
  return OK;
}
API cudaDeviceSynchronize() {
  use_context();
  return noted(synchronize_device(current_device()));
}
API cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return OK;
}
API cudaDeviceEnablePeerAccess(int, unsigned) { return OK; }
API cudaDeviceGetAttribute(int* out, int number, int device) {
  *out = attribute(number, device);
  return OK;
}
API cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02X:00.0", device + 1);
  return OK;
}
API cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return OK;
}
API cudaGetDeviceProperties(DeviceProperties* out, int device) {
  if (device < 0 || device >= device_count()) return noted(INVALID_DEVICE);
  *out = {};
  snprintf(out->name, sizeof out->name, "Emulated GPU");
  memcpy(out->uuid, uuid(device), 16);
  out->total_memory = total_memory();
  out->shared_memory_per_block = attribute(8, device);
  out->registers_per_block = attribute(12, device);
  out->warp_size = attribute(10, device);
  out->max_threads_per_block = attribute(1, device);
  for (int i = 0; i < 3; i++) {
    out->max_threads[i] = attribute(2 + i, device);
    out->max_grid[i] = attribute(5 + i, device);
  }
  out->major = attribute(75, device);
  out->multiprocessors = attribute(16, device);
  out->max_threads_per_multiprocessor = attribute(39, device);
  out->can_map_host_memory = out->concurrent_kernels = out->unified_addressing = out->stream_priorities = 1;
  out->pci_bus = attribute(33, device);
  out->copy_engines = attribute(40, device);
  out->l2_cache_bytes = 1 << 20;
  out->shared_memory_per_multiprocessor = out->shared_memory_per_block_optin = attribute(81, device);
  return OK;
}
API cudaMemGetInfo(size_t* free, size_t* total) {
  use_context();
  *free = free_memory(current_device());
  *total = total_memory();
  return OK;
}
API cudaProfilerStart() { return OK; }
API cudaProfilerStop() { return OK; }

// errors
API cudaGetLastError() {
  Code sticky = device_count() ? device_error(current_device()) : OK;
  return sticky ? sticky : take_last();
}
API cudaPeekAtLastError() { return peek_last(); }
extern "C" EXPORTED const char* cudaGetErrorName(int code) { return name_of(code); }
extern "C" EXPORTED const char* cudaGetErrorString(int code) { return text_of(code); }

// memory
API cudaMalloc(void** out, size_t size) { return noted(allocate(out, size)); }
API cudaFree(void* pointer) {
  use_context();
  return noted(release(pointer));
}
API cudaHostAlloc(void** out, size_t size, unsigned) { return noted(allocate_host(out, size)); }
API cudaFreeHost(void* pointer) { return noted(release_host(pointer)); }
API cudaHostRegister(void* pointer, size_t size, unsigned) {
  register_host(pointer, size);
  return OK;
}
API cudaHostUnregister(void* pointer) {
  unregister_host(pointer);
  return OK;
}
API cudaHostGetDevicePointer(void** out, void* pointer, unsigned) {
  *out = pointer;
  return OK;
}
API cudaPointerGetAttributes(PointerAttributes* out, const void* pointer) {
  use_context();
  int device = -2;
  Kind kind = kind_of(pointer, &device);
  *out = {};
  out->type = kind == Kind::Device ? 2 : kind == Kind::Host ? 1 : 0;
  out->device = device;
  out->device_pointer = kind == Kind::Unknown ? nullptr : (void*)pointer;
  out->host_pointer = kind == Kind::Host ? (void*)pointer : nullptr;
  return OK;
}
API cudaMemcpy(void* to, const void* from, size_t size, int) {
  return noted(copy(to, from, size, stream_of(nullptr), true));
}
API cudaMemcpyAsync(void* to, const void* from, size_t size, int, void* stream) {
  return noted(copy(to, from, size, stream_of(stream), false));
}
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, void* stream) {
  return noted(copy(to, from, size, stream_of(stream), false));
}
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, int,
                      void* stream) {
  for (size_t i = 0; i < height; i++)
    if (Code code = copy((char*)to + i * to_pitch, (char*)from + i * from_pitch, width, stream_of(stream), false))
      return noted(code);
  return OK;
}
API cudaMemset(void* pointer, int value, size_t size) {
  return noted(fill(pointer, value, size, stream_of(nullptr), false));
}
API cudaMemsetAsync(void* pointer, int value, size_t size, void* stream) {
  return noted(fill(pointer, value, size, stream_of(stream), false));
}

// streams
API cudaStreamCreate(void** out) {
  *out = create_stream(0, 0);
  return OK;
}
API cudaStreamCreateWithFlags(void** out, unsigned flags) {
  *out = create_stream(flags, 0);
  return OK;
}
API cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  *out = create_stream(flags, priority);
  return OK;
}
API cudaStreamDestroy(void* stream) {
  Stream* found = stream_of(stream);
  return noted(found ? destroy_stream(found) : INVALID_HANDLE);
}
API cudaStreamGetPriority(void* stream, int* out) {
  *out = priority_of(stream_of(stream));
  return OK;
}
API cudaStreamGetFlags(void* stream, unsigned* out) {
  *out = flags_of(stream_of(stream));
  return OK;
}
API cudaStreamGetId(void* stream, unsigned long long* out) {
  *out = id_of(stream_of(stream));
  return OK;
}
API cudaStreamGetDevice(void* stream, int* out) {
  *out = device_of(stream_of(stream));
  return OK;
}
API cudaStreamQuery(void* stream) { return noted(query(stream_of(stream))); }
API cudaStreamSynchronize(void* stream) { return noted(synchronize(stream_of(stream))); }
API cudaStreamWaitEvent(void* stream, void* event, unsigned) { return noted(wait(stream_of(stream), (Event*)event)); }
API cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return noted(enqueue(stream_of(stream), [=] { function(data); }));
}
API cudaStreamAddCallback(void* stream, void (*function)(void*, int, void*), void* data, unsigned) {
  return noted(enqueue(stream_of(stream), [=] { function(stream, OK, data); }));
}

// events
API cudaEventCreate(void** out) {
  *out = create_event(0);
  return OK;
}
API cudaEventCreateWithFlags(void** out, unsigned flags) {
  *out = create_event(flags);
  return OK;
}
API cudaEventDestroy(void* event) { return noted(destroy_event((Event*)event)); }
API cudaEventRecord(void* event, void* stream) { return noted(record((Event*)event, stream_of(stream))); }
API cudaEventRecordWithFlags(void* event, void* stream, unsigned) {
  return noted(record((Event*)event, stream_of(stream)));
}
API cudaEventQuery(void* event) { return noted(query((Event*)event)); }
API cudaEventSynchronize(void* event) { return noted(synchronize((Event*)event)); }
API cudaEventElapsedTime(float* out, void* first, void* second) {
  return noted(elapsed(out, (Event*)first, (Event*)second));
}

// graphs
API cudaStreamBeginCapture(void* stream, int mode) { return noted(begin_capture(stream_of(stream), mode)); }
API cudaStreamEndCapture(void* stream, void** out) { return noted(end_capture(stream_of(stream), (Graph**)out)); }
API cudaStreamIsCapturing(void* stream, int* out) {
  *out = capture_status(stream_of(stream));
  return OK;
}
API cudaStreamGetCaptureInfo(void* stream, int* out, unsigned long long* id, void** graph, void** nodes, void** edges,
                             size_t* count) {
  uint64_t number = 0;
  Graph* found = nullptr;
  *out = capture_status(stream_of(stream), &number, &found);
  if (id) *id = number;
  if (graph) *graph = found;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return OK;
}
API cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = exchange_capture_mode(*mode);
  return OK;
}
API cudaGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) {
  *out = clone((Graph*)graph);
  return OK;
}
API cudaGraphLaunch(void* graph, void* stream) { return noted(launch((Graph*)graph, stream_of(stream))); }
API cudaGraphExecDestroy(void* graph) {
  destroy((Graph*)graph);
  return OK;
}
API cudaGraphDestroy(void* graph) {
  destroy((Graph*)graph);
  return OK;
}
API cudaGraphGetNodes(void* graph, void**, size_t* count) {
  *count = count_nodes((Graph*)graph);
  return OK;
}
API cudaUserObjectCreate(void** out, void* object, void (*destroy_object)(void*), unsigned, unsigned) {
  *out = new Task([=] { destroy_object(object); });
  return OK;
}
API cudaGraphRetainUserObject(void* graph, void* object, unsigned, unsigned) {
  retain((Graph*)graph, *(Task*)object);
  return OK;
}

API cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, int* result) {
  *out = emulated_gpu_find(name);
  if (result) *result = *out ? 0 : 1;
  if (!*out && traces()) say("cudaGetDriverEntryPoint: no %s", name);
  return OK;
}
