// E4M3 numbers as scales, and their bytes.
#pragma once

#include "../../simd/lanes.h"

namespace {

// The byte of a number from 0 to 448, rounded to nearest even.
INLINE I e4m3_of(F x) {
  const I small = (I)(x + splat(0x1p14f)) - (I)splat(0x1p14f);  // in the last place of 2^14
  const I normal = (((I)x + 0x7ffff + ((I)x >> 20 & 1)) >> 20) - (120 << 3);
  return choose(x < splat(0x1p-6f), small, normal);
}

// The number of any byte; 127 and 255 are NaN.
INLINE F value_of_e4m3(I byte) {
  const I size = byte & 127;
  const I small = (I)(__builtin_convertvector(size, F) * 0x1p-9f), normal = (size << 20) + (120 << 23);
  const I number = choose(size < 8, small, choose(size == 127, splat(0x7fc00000), normal));
  return (F)(number | (byte & 128) << 24);
}

}  // namespace
