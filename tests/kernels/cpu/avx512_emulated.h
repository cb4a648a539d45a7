// AVX-512 for CPUs that have none, by SIMDe (Debian's libsimde-dev): `.ci/avx512` compiles the kernels with it. Here is
// what its release 0.7.4 lacks of what they use.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <string.h>

namespace emulated {

template <class T, class V> struct Lanes {
  static constexpr int COUNT = sizeof(V) / sizeof(T);
  T lane[COUNT];
  Lanes(V v) { memcpy(lane, &v, sizeof v); }
  operator V() const {
    V v;
    memcpy(&v, lane, sizeof v);
    return v;
  }
  T& operator[](int i) { return lane[i]; }
};

// ---- conversions, lane by lane ----

template <class From, class To, class V, class W> inline V converted(W from) {
  Lanes<From, W> x(from);
  Lanes<To, V> y(V{});
  for (int i = 0; i < x.COUNT && i < y.COUNT; i++) y[i] = (To)x[i];
  return y;
}
inline __m512i cvtepi8_epi32(__m128i x) { return converted<int8_t, int32_t, __m512i>(x); }
inline __m512i cvtepu8_epi16(__m256i x) { return converted<uint8_t, uint16_t, __m512i>(x); }
inline __m512i cvtepu8_epi32(__m128i x) { return converted<uint8_t, uint32_t, __m512i>(x); }
inline __m512i cvtepu8_epi64(__m128i x) { return converted<uint8_t, uint64_t, __m512i>(x); }
inline __m512i cvtepi16_epi32(__m256i x) { return converted<int16_t, int32_t, __m512i>(x); }
inline __m512i cvtepu16_epi32(__m256i x) { return converted<uint16_t, uint32_t, __m512i>(x); }
inline __m256i cvtepi32_epi16(__m512i x) { return converted<int32_t, int16_t, __m256i>(x); }
inline __m128i cvtepi32_epi8(__m512i x) { return converted<int32_t, int8_t, __m128i>(x); }
inline __m512 cvtepi32_ps(__m512i x) { return converted<int32_t, float, __m512>(x); }

// By halves, in the rounding mode of the moment, as the real one.
inline __m512i cvtps_epi32(__m512 x) {
  Lanes<__m256, __m512> half(x);
  Lanes<__m256i, __m512i> out(__m512i{});
  for (int i = 0; i < 2; i++) out[i] = _mm256_cvtps_epi32(half[i]);
  return out;
}
inline __m512 cvtph_ps(__m256i x) {
  Lanes<__m128i, __m256i> half(x);
  Lanes<__m256, __m512> out(__m512{});
  for (int i = 0; i < 2; i++) out[i] = _mm256_cvtph_ps(half[i]);
  return out;
}
inline __m256i cvtps_ph(__m512 x) {
  Lanes<__m256, __m512> half(x);
  Lanes<__m128i, __m256i> out(__m256i{});
  for (int i = 0; i < 2; i++) out[i] = _mm256_cvtps_ph(half[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return out;
}

// ---- loads and stores of the lanes in a mask: the others are not touched, and are 0 ----

template <class T, class V> inline V loaded(uint64_t mask, const void* from) {
  Lanes<T, V> x(V{});
  for (int i = 0; i < x.COUNT; i++)
    if (mask >> i & 1) memcpy(&x[i], (const T*)from + i, sizeof(T));
  return x;
}
template <class T, class V> inline void stored(void* to, uint64_t mask, V v) {
  Lanes<T, V> x(v);
  for (int i = 0; i < x.COUNT; i++)
    if (mask >> i & 1) memcpy((T*)to + i, &x[i], sizeof(T));
}

// ---- comparisons and what they select, of 32 bytes ----

template <class T, class V, class Holds> inline uint32_t where(V v, V w, Holds holds) {
  Lanes<T, V> a(v), b(w);
  uint32_t mask = 0;
  for (int i = 0; i < a.COUNT; i++) mask |= (uint32_t)holds(a[i], b[i]) << i;
  return mask;
}
inline uint32_t equal(__m256i a, __m256i b) { return where<uint8_t>(a, b, [](int x, int y) { return x == y; }); }
inline uint32_t less(__m256i a, __m256i b) { return where<uint8_t>(a, b, [](int x, int y) { return x < y; }); }
inline uint32_t common(__m256i a, __m256i b) { return where<uint8_t>(a, b, [](int x, int y) { return (x & y) != 0; }); }
inline __mmask16 common(__m512i a, __m512i b) {
  return (__mmask16)where<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return (x & y) != 0; });
}
inline __m256i chosen(__m256i otherwise, uint32_t mask, __m256i v) {
  Lanes<uint8_t, __m256i> x(otherwise), y(v);
  for (int i = 0; i < 32; i++) x[i] = mask >> i & 1 ? y[i] : x[i];
  return x;
}

// ---- arithmetic ----

inline __m512 less_rounded_up(__m512 v, __m512 w) {
  Lanes<float, __m512> x(v), y(w);
  const unsigned before = _MM_GET_ROUNDING_MODE();
  _MM_SET_ROUNDING_MODE(_MM_ROUND_UP);
  for (int i = 0; i < 16; i++) {
    volatile float a = x[i];  // or the compiler subtracts before the mode is set
    volatile float difference = a - y[i];
    x[i] = difference;
  }
  _MM_SET_ROUNDING_MODE(before);
  return x;
}
inline __m512i shuffled(__m512i v, int order) {
  Lanes<int32_t, __m512i> x(v), y(v);
  for (int i = 0; i < 16; i++) y[i] = x[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return y;
}
inline __m512i rounded_up(__m512 v) { return cvtps_epi32(simde_mm512_ceil_ps(v)); }
inline __m512i shifted_right(__mmask16 mask, __m512i v, __m512i by) {
  Lanes<int32_t, __m512i> x(v);
  Lanes<uint32_t, __m512i> n(by);
  for (int i = 0; i < 16; i++) x[i] = mask >> i & 1 ? x[i] >> (n[i] < 31 ? n[i] : 31) : 0;
  return x;
}
template <class Of> inline float of_all(__m512 v, Of of) {  // by halves, as compilers do it
  Lanes<float, __m512> x(v);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = of(x[i], x[i + half]);
  return x[0];
}
inline float sum(__m512 v) { return of_all(v, [](float a, float b) { return a + b; }); }
inline float largest(__m512 v) { return of_all(v, [](float a, float b) { return a > b ? a : b; }); }

}  // namespace emulated

#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi16 emulated::cvtepu8_epi16
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepu8_epi64 emulated::cvtepu8_epi64
#define _mm512_cvtepi16_epi32 emulated::cvtepi16_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph(x, to_nearest) emulated::cvtps_ph(x)

#define _mm512_maskz_loadu_ps(mask, from) (emulated::loaded<float, __m512>(mask, from))
#define _mm512_maskz_loadu_epi16(mask, from) (emulated::loaded<uint16_t, __m512i>(mask, from))
#define _mm512_maskz_loadu_epi8(mask, from) (emulated::loaded<uint8_t, __m512i>(mask, from))
#define _mm256_maskz_loadu_epi16(mask, from) (emulated::loaded<uint16_t, __m256i>(mask, from))
#define _mm256_maskz_loadu_epi8(mask, from) (emulated::loaded<uint8_t, __m256i>(mask, from))
#define _mm_maskz_loadu_epi8(mask, from) (emulated::loaded<uint8_t, __m128i>(mask, from))
#define _mm512_mask_storeu_ps(to, mask, v) emulated::stored<float>(to, mask, v)
#define _mm512_mask_storeu_epi32(to, mask, v) emulated::stored<uint32_t>(to, mask, v)
#define _mm256_mask_storeu_epi16(to, mask, v) emulated::stored<uint16_t>(to, mask, v)
#define _mm512_stream_si512(to, v) _mm512_storeu_si512(to, v)

#define _mm256_cmpeq_epi8_mask emulated::equal
#define _mm256_cmpeq_epu8_mask emulated::equal
#define _mm256_cmplt_epu8_mask emulated::less
#define _mm256_cmpgt_epu8_mask(a, b) emulated::less(b, a)
#define _mm256_test_epi8_mask emulated::common
#define _mm256_testn_epi8_mask(a, b) (~emulated::common(a, b))
#define _mm512_testn_epi32_mask(a, b) ((__mmask16)~emulated::common(a, b))
#define _mm256_mask_add_epi8(x, mask, a, b) emulated::chosen(x, mask, _mm256_add_epi8(a, b))
#define _mm256_mask_sub_epi8(x, mask, a, b) emulated::chosen(x, mask, _mm256_sub_epi8(a, b))
#define _mm256_mask_max_epu8(x, mask, a, b) emulated::chosen(x, mask, _mm256_max_epu8(a, b))

#define _mm512_sub_round_ps(a, b, up) emulated::less_rounded_up(a, b)
#define _mm512_cvt_roundps_epi32(x, up) emulated::rounded_up(x)
#define _mm512_mask_shuffle_epi32(x, mask, v, order) \
  simde_mm512_mask_mov_epi32(x, mask, emulated::shuffled(v, order))
#define _mm512_srav_epi32(v, by) emulated::shifted_right(0xffff, v, by)
#define _mm512_maskz_srav_epi32 emulated::shifted_right
#define _mm512_reduce_add_ps emulated::sum
#define _mm512_reduce_max_ps emulated::largest
#undef _mm512_madd_epi16  // SIMDe's takes the arguments of another
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32  // of AVX-VNNI
#define _mm256_dpwssd_avx_epi32 simde_mm256_dpwssd_epi32
#define _mm512_zextsi256_si512(v) simde_mm512_inserti64x4(simde_mm512_setzero_si512(), v, 0)
