// abi.h as the C++ sources see it: C linkage, exported from the library.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {
#include "abi.h"
}
#pragma GCC visibility pop

// The tensor's exponent as SIGNED_E4M3 stores it, whose steps and their inverses are to be normal numbers; foreign bytes too.
inline int32_t clipped(int32_t exponent) {
  constexpr int32_t lowest = 127 - 90, highest = 127 + 120;
  return exponent == NAN_EXPONENT ? exponent : exponent < lowest ? lowest : exponent > highest ? highest : exponent;
}
