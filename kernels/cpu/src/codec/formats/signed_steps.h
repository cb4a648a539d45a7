// The steps of scales of SIGNED_E4M3. kernels/reference/formats.py defines every bit. Steps and their inverses are normal
// floats, or 0, or NaN.
#pragma once

#include "../../simd/lanes.h"

namespace {

// The bit of a scale that says that the step is negative, as the block's largest value is positive.
constexpr int STEP_IS_NEGATIVE = 128;

// Steps from the scales of one tensor.
struct SignedSteps {
  bool nan;           // the whole tensor is
  int lowest;         // biased exponent of the step of an E4M3 number whose exponent field is 0
  float subnormal;    // the step of the least E4M3 number

  SignedSteps(int bits, int tensor_exponent)
      : nan(tensor_exponent == NAN_EXPONENT), lowest(tensor_exponent - 7 - bits - 6) {
    const int32_t least = (lowest - 2) * (1 << 23);  // 2^-9, where `lowest` is 2^-7; foreign bytes make it negative
    memcpy(&subnormal, &least, sizeof least);
  }

  INLINE F of(I scale) const {
    if (nan) return (F)splat(0x7fc00000);
    const I size = scale & (STEP_IS_NEGATIVE - 1), sign = (scale & STEP_IS_NEGATIVE) << 24;
    const I normal = (size << 20) + lowest * (1 << 23);
    const I small = (I)(__builtin_convertvector(size, F) * subnormal);
    return (F)(choose(size < 8, small, normal) | sign);
  }
};

}  // namespace
