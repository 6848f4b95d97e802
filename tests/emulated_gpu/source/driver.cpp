// The driver API of the emulated GPUs: what torch, cuda.core and cuda.bindings ask of libcuda.so.1.
// Returned numbers are CUresult's, which agree with Code.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "device.h"

using namespace emulated;

namespace {
char contexts[64];  // the address of the n-th is the primary context of device n
void* context_of(int device) { return &contexts[device]; }
bool is_context(void* context) { return context >= contexts && context < contexts + device_count(); }
int device_of_context(void* context) { return int((char*)context - contexts); }

enum PointerAttribute {  // CUpointer_attribute
  CONTEXT = 1,
  MEMORY_TYPE = 2,
  DEVICE_POINTER = 3,
  HOST_POINTER = 4,
  IS_MANAGED = 8,
  DEVICE_ORDINAL = 9,
  RANGE_START = 11,
  RANGE_SIZE = 12,
};
}  // namespace

#define API extern "C" EXPORTED int

API cuInit(unsigned) { return device_count() ? OK : NO_DEVICE; }
API cuDriverGetVersion(int* version) {
  *version = 13000;
  return OK;
}
API cuDeviceGet(int* out, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
  *out = ordinal;
  return OK;
}
API cuDeviceGetCount(int* count) {
  *count = device_count();
  return OK;
}
API cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "Emulated GPU");
  return OK;
}
API cuDeviceGetUuid_v2(void* out, int device) {
  memcpy(out, uuid(device), 16);
  return OK;
}
API cuDeviceTotalMem_v2(size_t* out, int) {
  *out = total_memory();
  return OK;
}
API cuDeviceGetAttribute(int* out, int number, int device) {
  *out = attribute(number, device);
  return OK;
}

// contexts
API cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = context_of(device);
  return OK;
}
API cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = is_active(device);
  return OK;
}
API cuCtxGetCurrent(void** out) {
  *out = has_context() ? context_of(current_device()) : nullptr;
  return OK;
}
API cuCtxSetCurrent(void* context) {
  if (!context) {
    clear_context();
    return OK;
  }
  return is_context(context) ? set_device(device_of_context(context)) : INVALID_CONTEXT;
}
API cuCtxPushCurrent_v2(void* context) { return cuCtxSetCurrent(context); }
API cuCtxPopCurrent_v2(void** out) { return cuCtxGetCurrent(out); }
API cuCtxGetDevice(int* out) {
  if (!has_context()) return INVALID_CONTEXT;
  *out = current_device();
  return OK;
}
API cuCtxSynchronize() { return synchronize_device(current_device()); }

// streams and events
API cuStreamCreate(void** out, unsigned flags) {
  *out = create_stream(flags, 0);
  return OK;
}
API cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  *out = create_stream(flags, priority);
  return OK;
}
API cuStreamDestroy_v2(void* stream) {
  Stream* found = stream_of(stream);
  return found ? destroy_stream(found) : INVALID_HANDLE;
}
API cuStreamSynchronize(void* stream) { return synchronize(stream_of(stream)); }
API cuStreamQuery(void* stream) { return query(stream_of(stream)); }
API cuStreamWaitEvent(void* stream, void* event, unsigned) { return wait(stream_of(stream), (Event*)event); }
API cuStreamGetFlags(void* stream, unsigned* out) {
  *out = flags_of(stream_of(stream));
  return OK;
}
API cuStreamGetPriority(void* stream, int* out) {
  *out = priority_of(stream_of(stream));
  return OK;
}
API cuStreamGetId(void* stream, unsigned long long* out) {
  *out = id_of(stream_of(stream));
  return OK;
}
API cuStreamGetCtx(void* stream, void** out) {
  *out = context_of(device_of(stream_of(stream)));
  return OK;
}
API cuStreamGetDevice(void* stream, int* out) {
  *out = device_of(stream_of(stream));
  return OK;
}
API cuStreamIsCapturing(void* stream, int* out) {
  *out = capture_status(stream_of(stream));
  return OK;
}
API cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return enqueue(stream_of(stream), [=] { function(data); }, {}, "a host function");
}
API cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = exchange_capture_mode(*mode);
  return OK;
}
API cuEventCreate(void** out, unsigned flags) {
  *out = create_event(flags);
  return OK;
}
API cuEventDestroy_v2(void* event) { return destroy_event((Event*)event); }
API cuEventRecord(void* event, void* stream) { return record((Event*)event, stream_of(stream)); }
API cuEventQuery(void* event) { return query((Event*)event); }
API cuEventSynchronize(void* event) { return synchronize((Event*)event); }

// memory
API cuMemAlloc_v2(void** out, size_t size) { return allocate(out, size); }
API cuMemFree_v2(void* pointer) { return release(pointer); }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = free_memory(current_device());
  *total = total_memory();
  return OK;
}
API cuMemcpyAsync(void* to, void* from, size_t size, void* stream) {
  return copy(to, from, size, stream_of(stream), false);
}
API cuMemGetAddressRange_v2(void** base, size_t* size, void* pointer) {
  void* start;
  size_t length;
  if (kind_of(pointer, nullptr, &start, &length) != Kind::Device) return NOT_FOUND;
  if (base) *base = start;
  if (size) *size = length;
  return OK;
}
API cuPointerGetAttribute(void* out, int number, void* pointer) {
  int device = 0;
  void* base = nullptr;
  size_t size = 0;
  Kind kind = kind_of(pointer, &device, &base, &size);
  if (kind == Kind::Unknown) return INVALID_VALUE;
  switch (number) {
    case CONTEXT: *(void**)out = context_of(device); break;
    case MEMORY_TYPE: *(unsigned*)out = kind == Kind::Device ? 2 : 1; break;
    case DEVICE_POINTER: *(void**)out = pointer; break;
    case HOST_POINTER: *(void**)out = kind == Kind::Host ? pointer : nullptr; break;
    case IS_MANAGED: *(unsigned*)out = 0; break;
    case DEVICE_ORDINAL: *(int*)out = device; break;
    case RANGE_START: *(void**)out = base; break;
    case RANGE_SIZE: *(size_t*)out = size; break;
    default: say("cuPointerGetAttribute %d is not emulated", number); return NOT_SUPPORTED;
  }
  return OK;
}
API cuPointerGetAttributes(unsigned count, int* numbers, void** out, void* pointer) {
  for (unsigned i = 0; i < count; i++) {
    if (!cuPointerGetAttribute(out[i], numbers[i], pointer)) continue;
    switch (numbers[i]) {  // plain host memory: nothing is known of it, which is no error here
      case MEMORY_TYPE: case IS_MANAGED: *(unsigned*)out[i] = 0; break;
      case DEVICE_ORDINAL: *(int*)out[i] = -2; break;
      default: *(void**)out[i] = nullptr;
    }
  }
  return OK;
}

// errors, and the way to the entry points above
API cuGetErrorName(int code, const char** out) {
  *out = name_of(code);
  return OK;
}
API cuGetErrorString(int code, const char** out) {
  *out = text_of(code);
  return OK;
}
API cuGetExportTable(const void** out, const void*) {
  say("cuGetExportTable: a library that brings its own CUDA runtime cannot run on an emulated GPU");
  *out = nullptr;
  return NOT_FOUND;
}
extern "C" EXPORTED void* emulated_gpu_find(const char* name) {
  static void* self = [] {
    Dl_info info;
    dladdr((void*)contexts, &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", name);
  void* found = dlsym(self, newer);
  return found ? found : dlsym(self, name);
}
API cuGetProcAddress_v2(const char* name, void** out, int, uint64_t, int* result) {
  *out = strcmp(name, "cuGetProcAddress") ? emulated_gpu_find(name) : (void*)cuGetProcAddress_v2;
  if (result) *result = *out ? 0 : 1;
  if (!*out && traces()) say("cuGetProcAddress: no %s", name);
  return *out ? OK : NOT_FOUND;
}
API cuGetProcAddress(const char* name, void** out, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}
