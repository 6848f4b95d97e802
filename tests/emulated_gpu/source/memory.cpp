// Device and host memory, copies, and who may still use memory that torch's allocator takes back.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "state.h"

namespace emulated {
constexpr size_t GRAIN = 2 << 20;

Code allocate(void** out, size_t size) {
  use_context();
  if (!device_count()) return NO_DEVICE;
  if (Code code = check_capture()) return code;
  Device& device = device_at(current_device());
  if (Code code = device_error(device.index)) return code;
  *out = nullptr;
  if (size == 0) return OK;
  size_t whole = (size + GRAIN - 1) / GRAIN * GRAIN;
  std::lock_guard<std::mutex> lock(world().mutex);
  if (device.used + whole > total_memory()) return OUT_OF_MEMORY;
  uintptr_t address;
  auto gap = device.gaps.find(whole);
  if (gap != device.gaps.end()) {
    address = gap->second;
    device.gaps.erase(gap);
  } else {
    address = device.next_address;
    device.next_address += whole + GRAIN;  // so that what runs over the end of an allocation faults
  }
  if (device.next_address > FIRST_ADDRESS + (device.index + 1) * SPAN) return OUT_OF_MEMORY;
  auto bytes = (void*)(address + TO_BYTES);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(bytes, whole, PROT_READ | PROT_WRITE, flags, -1, 0) != bytes) return OUT_OF_MEMORY;
  device.allocations[address] = whole;
  device.used += whole;
  *out = (void*)address;
  return OK;
}

Code release(void* pointer) {
  if (!pointer) return OK;
  auto address = uintptr_t(pointer);
  if (address < FIRST_ADDRESS || address >= FIRST_ADDRESS + device_count() * SPAN) return INVALID_VALUE;
  Device& device = device_at(int((address - FIRST_ADDRESS) / SPAN));
  synchronize_device(device.index);  // as cudaFree does
  std::lock_guard<std::mutex> lock(world().mutex);
  auto found = device.allocations.find(address);
  if (found == device.allocations.end()) return INVALID_VALUE;
  munmap((void*)(address + TO_BYTES), found->second);
  device.used -= found->second;
  device.gaps.emplace(found->second, address);
  device.allocations.erase(found);
  return OK;
}

Code allocate_host(void** out, size_t size) {
  use_context();
  *out = aligned_alloc(4096, size ? (size + 4095) / 4096 * 4096 : 4096);
  if (!*out) return OUT_OF_MEMORY;
  register_host(*out, size);
  return OK;
}
Code release_host(void* pointer) {
  if (!pointer) return OK;
  unregister_host(pointer);
  free(pointer);
  return OK;
}
void register_host(void* pointer, size_t size) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().host_memory[uintptr_t(pointer)] = size;
}
void unregister_host(void* pointer) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().host_memory.erase(uintptr_t(pointer));
}

Kind kind_of(const void* pointer, int* device, void** base, size_t* size) {
  auto address = uintptr_t(pointer);
  std::lock_guard<std::mutex> lock(world().mutex);
  bool is_device = address >= FIRST_ADDRESS && address < FIRST_ADDRESS + world().devices.size() * SPAN;
  int index = is_device ? int((address - FIRST_ADDRESS) / SPAN) : current_device();
  auto& known = is_device ? device_at(index).allocations : world().host_memory;
  auto found = known.upper_bound(address);
  if (found == known.begin()) return Kind::Unknown;
  --found;
  if (address >= found->first + found->second) return Kind::Unknown;
  if (device) *device = index;
  if (base) *base = (void*)found->first;
  if (size) *size = found->second;
  return is_device ? Kind::Device : Kind::Host;
}
bool is_allocated(const void* pointer, size_t length) {
  void* base;
  size_t size;
  if (kind_of(pointer, nullptr, &base, &size) != Kind::Device) return false;
  return uintptr_t(pointer) + length <= uintptr_t(base) + size;
}
void* bytes_at(const void* pointer) {
  auto address = uintptr_t(pointer);
  return (void*)(address >= FIRST_ADDRESS && address < FIRST_ADDRESS + TO_BYTES ? address + TO_BYTES : address);
}

Code copy(void* to, const void* from, size_t size, Stream* stream, bool blocks) {
  if (size == 0) return OK;
  Kind source = kind_of(from), target = kind_of(to);
  void *target_bytes = bytes_at(to), *source_bytes = bytes_at(from);
  Code code;
  if (source == Kind::Unknown && target == Kind::Device) {  // pageable memory is staged before the call returns
    auto staged = std::make_shared<std::vector<char>>((char*)source_bytes, (char*)source_bytes + size);
    code = enqueue(stream, [=] { memcpy(target_bytes, staged->data(), size); }, {{to, size, Use::Write}}, "a copy to the device");
  } else {
    code = enqueue(stream, [=] { memmove(target_bytes, source_bytes, size); }, {{to, size, Use::Write}, {from, size}}, "a copy");
    if (target == Kind::Unknown) blocks = true;  // the host waits for what goes to pageable memory
  }
  return code ? code : blocks && !capture_status(stream) ? synchronize(stream) : OK;
}
Code fill(void* to, int value, size_t size, Stream* stream, bool blocks) {
  void* bytes = bytes_at(to);
  Code code = enqueue(stream, [=] { memset(bytes, value, size); }, {{to, size, Use::Write}}, "a fill");
  return code ? code : blocks ? synchronize(stream) : OK;
}
}  // namespace emulated
