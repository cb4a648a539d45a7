// A step: the 64 columns that are worked on at a time, in memory and in registers.
#pragma once

#include "lanes.h"

namespace {

constexpr int UNITS = STEP / LANES;

#define EACH_UNIT(u) _Pragma("GCC unroll 16") for (int u = 0; u < UNITS; u++)

inline int size_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

INLINE void load_step(const void* x, int32_t dtype, F value[UNITS]) {
  if (dtype == FLOAT32) {
    EACH_UNIT(u) value[u] = load((const float*)x + u * LANES);
  } else if (dtype == BFLOAT16) {
    EACH_UNIT(u) value[u] = load((const bf16*)x + u * LANES);
  } else {
    EACH_UNIT(u) value[u] = load((const half*)x + u * LANES);
  }
}

// `exact`: bfloat16 holds the values.
INLINE void store_step(void* out, int32_t dtype, const F value[UNITS], bool past_caches, bool exact) {
  if (dtype == FLOAT32) {
    float* to = (float*)out;
    if (past_caches) {
      EACH_UNIT(u) stream(to + u * LANES, value[u]);
    } else {
      EACH_UNIT(u) store(to + u * LANES, value[u]);
    }
  } else {
    uint16_t* to = (uint16_t*)out;
    U narrow[UNITS];
    if (dtype == FLOAT16) {
      EACH_UNIT(u) narrow[u] = half_bits(value[u]) << 16;
    } else if (exact) {
      EACH_UNIT(u) narrow[u] = (U)value[u];
    } else {
      EACH_UNIT(u) narrow[u] = round_to_bf16((U)value[u]);
    }
#pragma GCC unroll 16
    for (int u = 0; u < UNITS; u += 2) {
      const U both = upper_halves(narrow[u], narrow[u + 1]);
      if (past_caches) stream(to + u * LANES, both);
      else write(to + u * LANES, both);
    }
  }
}

// The largest stored exponent of each of a step's groups, a byte each.
INLINE uint32_t exponents_of(const F x[UNITS]) {
  constexpr int units = 16 / LANES;
  I most[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    most[g] = units == 1 ? (I)x[g] : magnitude_bits(x[g * units]);
#pragma GCC unroll 4
    for (int u = 1; u < units; u++) most[g] = max_of(most[g], magnitude_bits(x[g * units + u]));
  }
  return four_exponents(most[0], most[1], most[2], most[3]);
}

}  // namespace
