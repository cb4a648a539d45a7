// The steps of formats whose scale has a sign: kernels/reference/formats.py defines every bit. Steps
// and their inverses are normal floats, or 0, or NaN.
#pragma once

#include "../simd/lanes.h"

namespace {

// The bit of a scale that says that the step is negative, as the box's largest value is positive.
constexpr int STEP_IS_NEGATIVE = 128;

// Scales of a power of two (SIGNED_POWER): 7 bits of exponent, biased; the last stands for NaN.
constexpr int SIGNED_BIAS = 96, SIGNED_NAN = 127;

// Steps from the scales of one tensor.
struct SignedSteps {
  bool power, nan;    // a power of two; the whole tensor is NaN
  int lowest;         // biased exponent of the step of an E4M3 number, or of a power, whose exponent field is 0
  float subnormal;    // the step of the least E4M3 number

  SignedSteps(int32_t kind, int bits, int tensor_exponent) : power(kind == SIGNED_POWER) {
    nan = !power && tensor_exponent == NAN_EXPONENT;
    lowest = power ? 127 - SIGNED_BIAS - (bits - 2) : tensor_exponent - 7 - bits - 6;
    const int32_t least = (lowest - 2) * (1 << 23);  // 2^-9, where `lowest` is 2^-7; foreign bytes make it negative
    memcpy(&subnormal, &least, sizeof least);
  }

  INLINE F of(I scale) const {
    const I size = scale & (STEP_IS_NEGATIVE - 1), sign = (scale & STEP_IS_NEGATIVE) << 24, quiet = splat(0x7fc00000);
    if (nan) return (F)quiet;
    if (power) return (F)(choose(size == SIGNED_NAN, quiet, (size + lowest) << 23) | sign);
    const I normal = (size << 20) + lowest * (1 << 23);
    const I small = (I)(__builtin_convertvector(size, F) * subnormal);
    return (F)(choose(size < 8, small, normal) | sign);
  }
};

}  // namespace
