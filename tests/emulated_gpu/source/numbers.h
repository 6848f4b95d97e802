// Reductions as NCCL does them: each element in its own type, small floats in float32. Bits of a sum may differ from
// NCCL's, because the order of the ranks is another.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "nccl_types.h"

namespace numbers {
// A small float's layout: bits of exponent and mantissa; with `has_infinity` false all-ones is the only NaN (e4m3fn).
template <int EXPONENT, int MANTISSA, bool HAS_INFINITY, class Bits>
struct SmallFloat {
  static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, TOP = (1 << EXPONENT) - 1;
  static constexpr Bits ALL = Bits((1u << (EXPONENT + MANTISSA)) - 1), INFINITE = Bits(TOP << MANTISSA);
  static constexpr Bits NOT_A_NUMBER = HAS_INFINITY ? Bits(INFINITE | 1 << (MANTISSA - 1)) : ALL;
  static constexpr Bits LARGEST = HAS_INFINITY ? Bits(INFINITE - 1) : Bits(ALL - 1);
  Bits bits;

  operator float() const {
    int exponent = (bits >> MANTISSA) & TOP, fraction = bits & ((1 << MANTISSA) - 1);
    bool is_negative = bits >> (EXPONENT + MANTISSA);
    float value;
    if (HAS_INFINITY && exponent == TOP)
      value = fraction ? NAN : INFINITY;
    else if (!HAS_INFINITY && (bits & ALL) == ALL)
      value = NAN;
    else if (exponent)
      value = ldexpf(float((1 << MANTISSA) + fraction), exponent - BIAS - MANTISSA);
    else
      value = ldexpf(float(fraction), 1 - BIAS - MANTISSA);
    return is_negative ? -value : value;
  }
  void set(float value) {  // to nearest, ties to even
    Bits sign = Bits(std::signbit(value)) << (EXPONENT + MANTISSA);
    Bits overflow = HAS_INFINITY ? INFINITE : NOT_A_NUMBER;
    float size = fabsf(value);
    if (std::isnan(value)) {
      bits = sign | NOT_A_NUMBER;
    } else if (std::isinf(size)) {
      bits = sign | overflow;
    } else if (size == 0) {
      bits = sign;
    } else {
      int exponent;
      frexpf(size, &exponent);
      exponent = std::max(exponent - 1, 1 - BIAS);
      auto whole = uint32_t(nearbyintf(ldexpf(size, MANTISSA - exponent)));
      uint32_t one = 1u << MANTISSA;
      uint32_t made = whole < one ? whole : (uint32_t(exponent + BIAS) << MANTISSA) + (whole - one);
      bits = sign | (made > LARGEST ? overflow : Bits(made));
    }
  }
};
using Half = SmallFloat<5, 10, true, uint16_t>;
using BFloat = SmallFloat<8, 7, true, uint16_t>;
using E4M3 = SmallFloat<4, 3, false, uint8_t>;
using E5M2 = SmallFloat<5, 2, true, uint8_t>;

template <class T, class Accumulator>
void combine_as(char* out, const std::vector<const char*>& inputs, size_t count, int op, const void* factor) {
  Accumulator scale = factor ? Accumulator(*(const T*)factor) : Accumulator();
  for (size_t i = 0; i < count; i++) {
    Accumulator total{};
    for (size_t rank = 0; rank < inputs.size(); rank++) {
      auto value = Accumulator(((const T*)inputs[rank])[i]);
      if (factor) value = value * scale;
      if (rank == 0) {
        total = value;
        continue;
      }
      switch (op) {
        case PROD: total = total * value; break;
        case MAX: total = value > total ? value : total; break;
        case MIN: total = value < total ? value : total; break;
        default: total = total + value;
      }
    }
    if (op == AVG) total = Accumulator(total / Accumulator(inputs.size()));
    if constexpr (std::is_arithmetic_v<T>)
      ((T*)out)[i] = total;
    else
      ((T*)out)[i].set(total);
  }
}

// Combine one array of each rank. `factor` scales each value first (ncclRedOpCreatePreMulSum).
inline void combine(char* out, const std::vector<const char*>& in, size_t count, int type, int op, const void* factor) {
  switch (type) {
    case INT8: return combine_as<int8_t, int8_t>(out, in, count, op, factor);
    case UINT8: return combine_as<uint8_t, uint8_t>(out, in, count, op, factor);
    case INT32: return combine_as<int32_t, int32_t>(out, in, count, op, factor);
    case UINT32: return combine_as<uint32_t, uint32_t>(out, in, count, op, factor);
    case INT64: return combine_as<int64_t, int64_t>(out, in, count, op, factor);
    case UINT64: return combine_as<uint64_t, uint64_t>(out, in, count, op, factor);
    case FLOAT16: return combine_as<Half, float>(out, in, count, op, factor);
    case FLOAT32: return combine_as<float, float>(out, in, count, op, factor);
    case FLOAT64: return combine_as<double, double>(out, in, count, op, factor);
    case BFLOAT16: return combine_as<BFloat, float>(out, in, count, op, factor);
    case FLOAT8_E4M3: return combine_as<E4M3, float>(out, in, count, op, factor);
    case FLOAT8_E5M2: return combine_as<E5M2, float>(out, in, count, op, factor);
  }
}
}  // namespace numbers
