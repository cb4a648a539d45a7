// From values to codes and back, given the scales: rounding, and the grid of formats whose step is a power of two.
//
// A grid represents a format in the encoder and the decoder: PowerGrid here, SignedGrid in signed.h.
#pragma once

#include "random.h"

namespace {

// Stored exponents from least_ordinary to MAX_ORDINARY are ordinary: each number below is one normal float, made from
// the exponent by integer arithmetic. A block of zeros is not ordinary.
constexpr int MAX_ORDINARY = 229;
INLINE int least_ordinary(int bits, bool stochastic) { return bits - 1 + (stochastic ? 16 : 0); }

// AVX-512 rounds stochastically in units of 2^-16.
template <bool STOCHASTIC> constexpr int FRACTION_BITS = STOCHASTIC && LANES == 16 ? 16 : 0;

// The factors of a block with an ordinary exponent, which take values to codes (up, with the fraction) and back (step).
// Where values are rounded to nearest and wanted as values, they give these at once: adding `shift`, whose last bit is
// the step, rounds as the processor does, subtracting it leaves the rounded value, and `most` is the largest.
template <bool STOCHASTIC, bool VALUES>
INLINE void ordinary_factors(I exponent, int bits, F& up_or_shift, F& step_or_most) {
  const I step = (exponent - (bits - 2)) << 23;
  if constexpr (VALUES && !STOCHASTIC) {
    up_or_shift = (F)((U)step + (uint32_t)(23 << 23 | 1 << 22));  // the largest exponents, not ordinary, wrap around
    step_or_most = (F)step * (float)((1 << (bits - 1)) - 1);
  } else {
    up_or_shift = (F)((252 + bits + FRACTION_BITS<STOCHASTIC> - exponent) << 23);
    step_or_most = (F)step;
  }
}

struct Factors {
  F up_or_shift, step_or_most;
};

// A tile's exponents, one for each column, from those of its groups.
INLINE void each_of_groups(const uint8_t group[4], uint8_t each[TILE]) {
  for (int g = 0; g < 4; g++) memset(each + 16 * g, group[g], 16);
}

// Whether four exponents, a byte each, are all ordinary.
INLINE bool all_ordinary(uint32_t four, int least) {
  constexpr uint32_t each = 0x01010101, tops = 0x80808080, beyond = 255 - MAX_ORDINARY;
  const uint32_t below = (four - each * (uint32_t)least) & ~four, above = (~four - each * beyond) & four;
  return !((below | above) & tops);
}
INLINE I not_ordinary(I exponent, int least) {
  return (I)((U)(exponent - least) > (U{} + (uint32_t)(MAX_ORDINARY - least)));
}

// Factors of the groups of 16 columns of a batch.
template <class Grid, bool VALUES> struct FactorsOfGroups {
  static constexpr int GROUPS = BATCH_COLUMNS / 16;
  alignas(64) float up_or_shift[GROUPS], step_or_most[GROUPS];
  bool ordinary;  // all of them

  INLINE void set(const uint8_t scale[GROUPS], const Grid& grid) {
    I unusual = {};
    for (int g = 0; g < GROUPS; g += LANES) {
      const I s = widened(scale + g);
      F a, b;
      grid.template ordinary_factors<VALUES>(s, a, b);
      write(up_or_shift + g, a);
      write(step_or_most + g, b);
      unusual |= grid.not_ordinary(s);
    }
    ordinary = !any(unusual);
  }
  // The factors of a vector of the tile whose first group is `group`.
  INLINE Factors of(int64_t group, int vector) const {
    const int64_t g = group + vector * LANES / 16;
    return {splat(up_or_shift[g]), splat(step_or_most[g])};
  }
};

// The factors that take LANES values under any stored exponents to codes and back. Either direction may pass the range of a
// float's exponent, so each is two factors. All are NaN at NAN_EXPONENT, so that no loop has to test for it.
struct AnyFactors {
  F up, up_more, down, down_more;

  INLINE AnyFactors(I exponent, int bits) {
    const I power = bits - 2 + 127 - exponent, half = power >> 1, rest = power - half;
    const I nan = (exponent == splat(NAN_EXPONENT)) & 0x7fc00000;
    up = (F)((127 + half) << 23 | nan);
    up_more = (F)((127 + rest) << 23);
    down = (F)((127 - half) << 23 | nan);
    down_more = (F)((127 - rest) << 23);
  }
  INLINE F codes_of(F x) const { return x * up * up_more; }
  INLINE F values_of(F code) const { return code * down * down_more; }
};

// The largest magnitude of codes that have a sign bit, or the smallest and the largest code of two's complement.
struct SignAndMagnitude {
  F most;
};
struct TwosComplement {
  F least, most;
};
INLINE F clamp(F t, SignAndMagnitude code) { return clamp(t, code.most); }
INLINE F clamp(F t, TwosComplement code) { return between(t, code.least, code.most); }

// |t| 2^16, clamped; of two's complement on both sides to that of the smallest code, so that `clipped` has to follow. A
// power of two's factor has brought in the 2^16; another might overflow by it.
#if LANES == 16
INLINE F size_in_fractions(F t, SignAndMagnitude code) {
  return (F)_mm512_range_ps((__m512)t, (__m512)(code.most * 65536), 0b1010);
}
INLINE F size_in_fractions(F t, TwosComplement code) {
  return (F)_mm512_range_ps((__m512)t, (__m512)code.least, 0b1010) * 65536;
}
INLINE I clipped(I code, SignAndMagnitude) { return code; }
INLINE I clipped(I code, TwosComplement bounds) {
  return (I)_mm512_min_epi32((__m512i)code, _mm512_cvtps_epi32((__m512)bounds.most));
}
#endif

#if LANES == 16
// The sign of x on codes that have none.
INLINE I with_sign_of(F x, I code) {
  const __mmask16 negative = _mm512_movepi32_mask((__m512i)x);
  return (I)_mm512_mask_sub_epi32((__m512i)code, negative, _mm512_setzero_si512(), (__m512i)code);
}
#endif

// Codes of t, which are values divided by their step (times 2^FRACTION_BITS where that is a power of two), in a vector of
// a tile. Those of a NaN are any numbers.
template <bool STOCHASTIC, class Bounds>
INLINE I round_to_code(F t, Bounds code, const Numbers& random, int vector) {
  if constexpr (!STOCHASTIC) return nearest(clamp(t, code));
#if LANES == 16
  // In units of 2^-16, with k the random number: |t| goes up if k + 1/2 < fraction, which is k < round(fraction),
  // halves rounded down; adding 2^16 - 1 - k carries into the whole part just then.
  constexpr int up = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
  const __m512 a = (__m512)size_in_fractions(t, code);
  __m512i whole = _mm512_cvt_roundps_epi32(_mm512_sub_round_ps(a, _mm512_set1_ps(0.5f), up), up);
  return clipped(with_sign_of(t, (I)(((U)whole + random.complement(vector)) >> 16)), code);
#else
  F a = absolute(clamp(t, code));
  I whole = __builtin_convertvector(a, I);
  F fraction = (a - __builtin_convertvector(whole, F)) * splat(0x1p16f);
  F uniform = splat(65535.5f) - __builtin_convertvector((I)random.complement(vector), F);
  whole -= uniform < fraction;
  I sign = (I)t >> 31;
  return (whole ^ sign) - sign;
#endif
}

// Values of codes, and of values, on the grid of an ordinary block.
INLINE F value_of(I code, F step) { return __builtin_convertvector(code, F) * step; }

INLINE F to_grid(F x, F shift, F most) { return clamp((x + shift) - shift, most); }

// Block floating point and fixed point: the scale is an exponent.
template <bool STOCHASTIC> struct PowerGrid {
  static constexpr bool SIGNED = false;
  static constexpr float FRACTIONS = 1 << FRACTION_BITS<STOCHASTIC>;
  const int bits, least;

  explicit PowerGrid(const CodecJob& job)
      : bits(job.desc->bits), least(least_ordinary(job.desc->bits, STOCHASTIC)) {}
  SignAndMagnitude codes() const { return {splat((float)((1 << (bits - 1)) - 1))}; }
  // The key by which values compare: the scale of a block is made of the largest.
  static INLINE I key_of(F x) { return magnitude_bits(x); }
  INLINE I scales_of(I key) const { return key >> 23; }
  INLINE I not_ordinary(I scale) const { return ::not_ordinary(scale, least); }
  INLINE bool all_ordinary(uint32_t four) const { return ::all_ordinary(four, least); }
  template <bool VALUES> INLINE void ordinary_factors(I scale, F& up_or_shift, F& step_or_most) const {
    ::ordinary_factors<STOCHASTIC, VALUES>(scale, bits, up_or_shift, step_or_most);
  }
  INLINE AnyFactors any_factors(I scale) const { return {scale, bits}; }
  // The last step of rounding x to the grid in fast tiles.
  INLINE F quantized(F x, Factors f, SignAndMagnitude) const { return to_grid(x, f.up_or_shift, f.step_or_most); }
};

}  // namespace
