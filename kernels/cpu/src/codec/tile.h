// A tile: the 64 columns that are worked on at a time, in memory and in registers.
#pragma once

#include "../simd/lanes.h"

namespace {

constexpr int VECTORS = TILE / LANES;

#define EACH_VECTOR(v) _Pragma("GCC unroll 16") for (int v = 0; v < VECTORS; v++)

inline int size_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE void load_tile(const void* x, int32_t dtype, F value[VECTORS]) {
  if (dtype == FLOAT32) {
    EACH_VECTOR(v) value[v] = load((const float*)x + v * LANES);
  } else if (dtype == BFLOAT16) {
    EACH_VECTOR(v) value[v] = load((const bf16*)x + v * LANES);
  } else {
    EACH_VECTOR(v) value[v] = load((const half*)x + v * LANES);
  }
}

// `exact`: bfloat16 holds the values.
INLINE void store_tile(void* out, int32_t dtype, const F value[VECTORS], bool past_caches, bool exact) {
  if (dtype == FLOAT32) {
    float* to = (float*)out;
    if (past_caches) {
      EACH_VECTOR(v) stream(to + v * LANES, value[v]);
    } else {
      EACH_VECTOR(v) store(to + v * LANES, value[v]);
    }
  } else {
    uint16_t* to = (uint16_t*)out;
    U narrow[VECTORS];
    if (dtype == FLOAT16) {
      EACH_VECTOR(v) narrow[v] = half_bits(value[v]) << 16;
    } else if (exact) {
      EACH_VECTOR(v) narrow[v] = (U)value[v];
    } else {
      EACH_VECTOR(v) narrow[v] = round_to_bf16((U)value[v]);
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v += 2) {
      const U both = upper_halves(narrow[v], narrow[v + 1]);
      if (past_caches) stream(to + v * LANES, both);
      else write(to + v * LANES, both);
    }
  }
}

// The largest keys of a tile's four groups, which largest_of_parts is to compare.
INLINE U keys_of(const F x[VECTORS]) {
  constexpr int units = 16 / LANES;
  U most[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    most[g] = signed_key(x[g * units]);
#pragma GCC unroll 4
    for (int v = 1; v < units; v++) most[g] = max_of(most[g], signed_key(x[g * units + v]));
  }
  return largest_lanes(most[0], most[1], most[2], most[3]);
}

// The largest stored exponents of a tile's four groups, a byte each, which largest_bytes is to compare.
INLINE U exponents_of(const F x[VECTORS]) {
  constexpr int units = 16 / LANES;
  I most[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    most[g] = units == 1 ? (I)x[g] : magnitude_bits(x[g * units]);
#pragma GCC unroll 4
    for (int v = 1; v < units; v++) most[g] = max_of(most[g], magnitude_bits(x[g * units + v]));
  }
  return exponent_bytes(most[0], most[1], most[2], most[3]);
}

}  // namespace
