// The few types of CUDA 13's binary interface that the emulated libraries exchange with their callers.
// Handles are pointers and enums are ints there, so only structures need to be spelt out.
#pragma once
#include <cstddef>

struct dim3 {
  unsigned x, y, z;
};

struct PointerAttributes {  // cudaPointerAttributes
  int type;                 // 0 unregistered, 1 host, 2 device
  int device;
  void* device_pointer;
  void* host_pointer;
  long reserved[8];
};

struct FunctionAttributes {  // cudaFuncAttributes, as far as torch reads it
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads, registers, ptx_version, binary_version;
  int others[26];
};

struct LaunchConfiguration {  // cudaLaunchConfig_t
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
  void* attributes;
  unsigned attribute_count;
};

struct DeviceProperties {  // cudaDeviceProp; what nobody asks for is only room
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_mask;
  size_t total_memory;
  size_t shared_memory_per_block;
  int registers_per_block;
  int warp_size;
  size_t pitch;
  int max_threads_per_block;
  int max_threads[3];
  int max_grid[3];
  size_t constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  int multiprocessors;
  int is_integrated;
  int can_map_host_memory;
  int textures_and_surfaces[39];
  size_t surface_alignment;
  int concurrent_kernels;
  int ecc;
  int pci_bus, pci_device, pci_domain;
  int tcc_driver;
  int copy_engines;
  int unified_addressing;
  int memory_bus_width;
  int l2_cache_bytes;
  int persisting_l2_cache_bytes;
  int max_threads_per_multiprocessor;
  int stream_priorities;
  int l1_caching[2];
  size_t shared_memory_per_multiprocessor;
  int registers_per_multiprocessor;
  int memory_models[8];
  int cooperative_launch;
  size_t shared_memory_per_block_optin;
  int others[82];
};
static_assert(sizeof(DeviceProperties) == 1008, "CUDA 13's cudaDeviceProp");
