// From values to codes and back, given the stored exponents.
#pragma once

#include "random.h"

namespace {

// What takes LANES values to codes and back.
struct Factors {
#if LANES == 16
  F power;
#else
  F up, up_more;
#endif
  F down;
};

// One exponent for a group of 16 columns.
template <bool STOCHASTIC> INLINE Factors group_factors(const Scales& s, uint32_t exponent) {
#if LANES == 16
  return {splat((STOCHASTIC ? s.power_16 : s.power)[exponent]), splat(s.down[exponent])};
#else
  return {splat(s.up[exponent]), splat(s.up_more[exponent]), splat(s.down[exponent])};
#endif
}

// An exponent for each column of a chunk.
template <bool STOCHASTIC> struct ColumnFactors {
#if LANES == 16
  alignas(64) float power[CHUNK];
#else
  alignas(64) float up[CHUNK], up_more[CHUNK];
#endif
  alignas(64) float down[CHUNK];

  INLINE void set(const Scales& s, int column, uint8_t exponent) {
#if LANES == 16
    power[column] = (STOCHASTIC ? s.power_16 : s.power)[exponent];
#else
    up[column] = s.up[exponent], up_more[column] = s.up_more[exponent];
#endif
    down[column] = s.down[exponent];
  }
  INLINE Factors at(int column) const {
#if LANES == 16
    return {load(power + column), load(down + column)};
#else
    return {load(up + column), load(up_more + column), load(down + column)};
#endif
  }
};

// Codes of x, the column its place in the chunk's random numbers. With ZERO_NAN, a box that holds a NaN or an infinity
// has codes 0; else they are any numbers.
template <bool STOCHASTIC, bool ZERO_NAN>
INLINE I round_to_code(F x, const Factors& f, F max_code, const Random& random, int column) {
#if LANES == 16
  F t = (F)_mm512_scalef_ps((__m512)x, (__m512)f.power);
  const __mmask16 number = ZERO_NAN ? _mm512_cmp_ps_mask((__m512)t, (__m512)t, _CMP_ORD_Q) : (__mmask16)-1;
  if constexpr (!STOCHASTIC) {
    return (I)_mm512_maskz_cvtps_epi32(number, (__m512)clamp(t, max_code));
  } else {
    // In units of 2^-16, with k the random number: |t| goes up if k + 1/2 < fraction, which is k < round(fraction), halves
    // rounded down; adding 2^16 - 1 - k carries into the whole part just then.
    constexpr int up = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
    __m512 a = _mm512_range_ps((__m512)t, (__m512)(max_code * 65536), 0b1010);
    __m512i whole = _mm512_maskz_cvt_roundps_epi32(number, _mm512_sub_round_ps(a, _mm512_set1_ps(0.5f), up), up);
    U carried = ((U)whole + random.complement(column)) >> 16;
    return (I)_mm512_mask_sub_epi32((__m512i)carried, _mm512_movepi32_mask((__m512i)x), _mm512_setzero_si512(), (__m512i)carried);
  }
#else
  F t = x * f.up * f.up_more;
  I code;
  if constexpr (!STOCHASTIC) {
    code = nearest(clamp(t, max_code));
  } else {
    F a = clamp(absolute(t), max_code);
    I whole = __builtin_convertvector(a, I);
    F fraction = (a - __builtin_convertvector(whole, F)) * splat(0x1p16f);
    F uniform = splat(65535.5f) - __builtin_convertvector((I)random.complement(column), F);
    whole -= uniform < fraction;
    I sign = (I)x >> 31;
    code = (whole ^ sign) - sign;
  }
  return ZERO_NAN ? code & (t == t) : code;
#endif
}

INLINE F decode_lanes(I code, const Factors& f) { return __builtin_convertvector(code, F) * f.down; }

}  // namespace
