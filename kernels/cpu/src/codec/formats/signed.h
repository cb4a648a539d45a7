// The grid of scales of SIGNED_E4M3: two's complement codes.
#pragma once

#include "e4m3.h"
#include "../rounding.h"
#include "signed_steps.h"

namespace {

// The factor that values are multiplied by instead of divided by the step; 0 for a step of 0.
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
  float up;  // the factor from a block's largest magnitude to the range of E4M3
  U most{}, opposite{};  // of the largest magnitudes of blocks: the largest, and 2^32 less the smallest that is not 0

  explicit SignedGrid(const CodecJob& job) : bits(job.desc->bits), steps(bits, job.tensor_exponent) {
    const int32_t factor = (127 + 7 + 127 - job.tensor_exponent) << 23;
    memcpy(&up, &factor, sizeof factor);
  }
  TwosComplement codes() const {
    const float least = (float)-(1 << (bits - 1));
    return {splat(least), splat(-1 - least)};
  }
  static INLINE U key_of(F x) { return signed_key(x); }

  void report(Magnitudes& found) const {
    for (int i = 0; i < LANES; i++) {
      uint32_t before = found.most;
      while (before < most[i] && !found.most.compare_exchange_weak(before, most[i])) {}
      before = found.least;
      while (opposite[i] && before > 0 - opposite[i] && !found.least.compare_exchange_weak(before, 0 - opposite[i])) {}
    }
  }

  INLINE I scales_of(U key) {
    if (steps.nan) return I{};
    const I size = (I)(key >> 1), positive = (I)(key & 1) * STEP_IS_NEGATIVE;
    most = max_of(most, (U)size), opposite = max_of(opposite, (U)-size);
    const I e4m3 = e4m3_of(smaller((F)size * up, splat(448.0f)));
    return e4m3 + (positive & (e4m3 > 0));
  }

  INLINE I not_ordinary(I) const { return I{} - (int32_t)steps.nan; }
  INLINE bool all_ordinary(uint32_t) const { return !steps.nan; }
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
