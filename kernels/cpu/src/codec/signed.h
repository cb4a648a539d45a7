// The grid of formats whose scale has a sign: two's complement codes, and steps of which kernels/reference/signed_bfp.py
// and signed_nvint.py define every bit. Steps and their inverses are normal floats, or 0, or NaN.
#pragma once

#include "rounding.h"

namespace {

// Of a scale: the step is negative, as the box's largest value is positive.
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
    const int32_t least = (lowest - 2) << 23;  // 2^-9, where `lowest` is 2^-7
    memcpy(&subnormal, &least, sizeof least);
  }

  INLINE F of(I scale) const {
    const I size = scale & (STEP_IS_NEGATIVE - 1), sign = (scale & STEP_IS_NEGATIVE) << 24, quiet = splat(0x7fc00000);
    if (nan) return (F)quiet;
    if (power) return (F)(choose(size == SIGNED_NAN, quiet, (size + lowest) << 23) | sign);
    const I normal = (size << 20) + (lowest << 23);
    const I small = (I)(__builtin_convertvector(size, F) * subnormal);
    return (F)(choose(size < 8, small, normal) | sign);
  }
};

// What multiplies instead of dividing by the step; 0 for a step of 0.
INLINE F inverse_of(F step) { return (F)((I)(splat(1.0f) / step) & (step != F{})); }

// As AnyFactors.
struct SignedFactors {
  F inverse, step;
  INLINE F codes_of(F x) const { return x * inverse; }
  INLINE F values_of(F code) const { return code * step; }
};

template <bool STOCHASTIC> struct SignedGrid {
  static constexpr bool SIGNED = true;
  static constexpr float FRACTIONS = 1;
  const int bits;
  const SignedSteps steps;
  float up;  // what takes a box's largest magnitude to the range of E4M3

  explicit SignedGrid(const CodecJob& job)
      : bits(job.desc->bits), steps(job.desc->scales, bits, job.tensor_exponent) {
    const int32_t factor = (127 + 7 + 127 - job.tensor_exponent) << 23;
    memcpy(&up, &factor, sizeof factor);
  }
  TwosComplement codes() const {
    const float least = (float)-(1 << (bits - 1));
    return {splat(least), splat(-1 - least)};
  }
  static INLINE U key_of(F x) { return signed_key(x); }

  INLINE I scales_of(U key) const {
    const I size = (I)(key >> 1), positive = (I)(key & 1) * STEP_IS_NEGATIVE;
    if (steps.power) {
      // E: the exponent, or one less where the significand is below that of 1 + 2^(1-bits)
      I e = ((size - (1 << (24 - bits))) >> 23) - (127 - SIGNED_BIAS);
      e = choose(e < 0, I{}, choose(e < SIGNED_NAN - 1, e, splat(SIGNED_NAN - 1)));
      e = choose(size == 0, I{}, e + positive);
      return choose(size >= 0x7f800000, splat(SIGNED_NAN), e);
    }
    if (steps.nan) return I{};
    F x = (F)size * up;
    x = choose(x < splat(448.0f), x, splat(448.0f));
    const I small = (I)(x + splat(0x1p14f)) - (I)splat(0x1p14f);  // in the last place of 2^14
    const I normal = (((I)x + 0x7ffff + ((I)x >> 20 & 1)) >> 20) - (120 << 3);
    const I e4m3 = choose(x < splat(0x1p-6f), small, normal);
    return e4m3 + (positive & (e4m3 > 0));
  }

  INLINE I not_ordinary(I scale) const {
    if (steps.power) return (scale & SIGNED_NAN) == SIGNED_NAN;
    return I{} - (int32_t)steps.nan;
  }
  INLINE bool all_ordinary(uint32_t four) const {
    constexpr uint32_t each = 0x01010101;
    return steps.power ? !((((four & ~(each << 7)) + each) >> 7) & each) : !steps.nan;
  }
  template <bool> INLINE void ordinary_factors(I scale, F& up_or_shift, F& step_or_most) const {
    step_or_most = steps.of(scale);
    up_or_shift = inverse_of(step_or_most);
  }
  INLINE SignedFactors any_factors(I scale) const {
    const F step = steps.of(scale);
    return {inverse_of(step), step};
  }
  INLINE F quantized(F x, Factors f, TwosComplement code) const {
    const F whole = splat(0x1.8p23f);
    return ((clamp(x * f.up_or_shift, code) + whole) - whole) * f.step_or_most;
  }
};

}  // namespace
