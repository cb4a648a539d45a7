// From values to codes and back, given the stored exponents.
#pragma once

#include "random.h"

namespace {

// What takes LANES values to codes and back. QUICK: the exponents are ordinary, and `up` is the one factor. Else
// it is the first of two, or for AVX-512 the power.
struct Factors {
  F up, up_more, down;
};

// The float whose exponent field is `field`, 1..254.
INLINE F with_exponent(I field) { return (F)(field << 23); }

// For stored exponents that are ordinary.
template <bool STOCHASTIC> INLINE Factors quick_factors(I exponent, int bits) {
  constexpr int more = STOCHASTIC && LANES == 16 ? 16 : 0;
  return {with_exponent(252 + bits + more - exponent), F{}, with_exponent(exponent - (bits - 2))};
}

// The same for each of four groups of 16 columns, whose exponents are the bytes of `four`.
template <bool STOCHASTIC> struct FourQuickFactors {
  typedef __attribute__((vector_size(4))) uint8_t Bytes;
  typedef __attribute__((vector_size(16))) int32_t Four;
  alignas(16) float up[4], down[4];

  INLINE FourQuickFactors(uint32_t four, int bits) {
    constexpr int more = STOCHASTIC && LANES == 16 ? 16 : 0;
#ifdef __SSE4_1__
    const Four exponent = (Four)_mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)four));
#else
    const Four exponent = __builtin_convertvector(read<Bytes>(&four), Four);
#endif
    write(up, (252 + bits + more - exponent) << 23);
    write(down, (exponent - (bits - 2)) << 23);
  }
  INLINE Factors at(int column) const { return {splat(up[column / 16]), F{}, splat(down[column / 16])}; }
};

// For any stored exponent, of a group of 16 columns.
template <bool STOCHASTIC> INLINE Factors group_factors(const Scales& s, uint32_t exponent) {
#if LANES == 16
  return {splat((STOCHASTIC ? s.power_16 : s.power)[exponent]), F{}, splat(s.down[exponent])};
#else
  return {splat(s.up[exponent]), splat(s.up_more[exponent]), splat(s.down[exponent])};
#endif
}

// For any stored exponents, one for each column of a chunk; or for ordinary ones.
template <bool STOCHASTIC> struct ColumnFactors {
  alignas(64) float up[CHUNK], up_more[CHUNK], down[CHUNK];

  INLINE void set(const Scales& s, int column, uint8_t exponent) {
#if LANES == 16
    up[column] = (STOCHASTIC ? s.power_16 : s.power)[exponent];
#else
    up[column] = s.up[exponent], up_more[column] = s.up_more[exponent];
#endif
    down[column] = s.down[exponent];
  }
  INLINE void set_quick(int column, I exponent, int bits) {
    Factors f = quick_factors<STOCHASTIC>(exponent, bits);
    write(up + column, f.up);
    write(down + column, f.down);
  }
  INLINE Factors at(int column) const {
    return {load(up + column), LANES == 16 ? F{} : load(up_more + column), load(down + column)};
  }
};

#if LANES == 16
// The sign of x on codes that have none.
INLINE I with_sign_of(F x, I code) {
  return (I)_mm512_mask_sub_epi32((__m512i)code, _mm512_movepi32_mask((__m512i)x), _mm512_setzero_si512(), (__m512i)code);
}
#endif

// Codes of x, the column its place in the chunk's random numbers. With ZERO_NAN, a box that holds a NaN or an infinity
// has codes 0; else they are any numbers.
template <bool STOCHASTIC, bool QUICK, bool ZERO_NAN>
INLINE I round_to_code(F x, const Factors& f, F max_code, const Numbers& random, int column) {
#if LANES == 16
  if constexpr (QUICK && !STOCHASTIC) {
    const __m512 shift = _mm512_set1_ps(0x1.8p23f);  // adding it leaves the rounded number in the low bits
    const __m512i most = _mm512_cvtps_epi32((__m512)max_code), least = _mm512_cvtps_epi32((__m512)-max_code);
    __m512i code = _mm512_sub_epi32((__m512i)_mm512_fmadd_ps((__m512)x, (__m512)f.up, shift), (__m512i)shift);
    return (I)_mm512_max_epi32(_mm512_min_epi32(code, most), least);
  }
  F t = QUICK ? x * f.up : (F)_mm512_scalef_ps((__m512)x, (__m512)f.up);
  const bool check = ZERO_NAN && !QUICK;
  const __mmask16 number = check ? _mm512_cmp_ps_mask((__m512)t, (__m512)t, _CMP_ORD_Q) : (__mmask16)-1;
  if constexpr (!STOCHASTIC) return (I)_mm512_maskz_cvtps_epi32(number, (__m512)clamp(t, max_code));
  // In units of 2^-16, with k the random number: |t| goes up if k + 1/2 < fraction, which is k < round(fraction), halves
  // rounded down; adding 2^16 - 1 - k carries into the whole part just then.
  constexpr int up = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
  __m512 a = _mm512_range_ps((__m512)t, (__m512)(max_code * 65536), 0b1010);
  __m512i whole = _mm512_maskz_cvt_roundps_epi32(number, _mm512_sub_round_ps(a, _mm512_set1_ps(0.5f), up), up);
  return with_sign_of(x, (I)(((U)whole + random.complement(column)) >> 16));
#else
  F t = QUICK ? x * f.up : x * f.up * f.up_more;
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
  return ZERO_NAN && !QUICK ? code & (t == t) : code;
#endif
}

INLINE F decode_lanes(I code, const Factors& f) { return __builtin_convertvector(code, F) * f.down; }

}  // namespace
