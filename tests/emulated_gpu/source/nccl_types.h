// The part of NCCL 2.30's binary interface that the emulated library offers.
#pragma once
#include <cstddef>

constexpr int NCCL_VERSION = 23007;
constexpr int UNIQUE_ID_BYTES = 128;
struct UniqueId {
  char bytes[UNIQUE_ID_BYTES];
};

enum Result : int {
  SUCCESS = 0,
  UNHANDLED_CUDA_ERROR = 1,
  SYSTEM_ERROR = 2,
  INTERNAL_ERROR = 3,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
};

enum DataType : int {
  INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2,
  DATA_TYPES,
};
constexpr size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

enum ReductionOp : int { SUM, PROD, MAX, MIN, AVG, PREDEFINED_OPS };
