// LANES values side by side, in the compiler's own vector types: the same source gives SSE2 or NEON (4 lanes), AVX2 (8)
// and AVX-512 (16). Intrinsics are used only if the vector types have no operation for it. Everything is in an anonymous
// namespace: each instruction set's file compiles its own copy, and the linker must never mix them.
#pragma once

#include <string.h>

#include "../codec/job.h"

#ifdef DSQ_X86
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

namespace {

// The hot loops are cut into functions for the reader; the compiler must not keep them apart.
#define ALWAYS __attribute__((always_inline))
#define INLINE inline ALWAYS

#define VECTOR(type, count) __attribute__((vector_size(sizeof(type) * (count)))) type
typedef VECTOR(float, LANES) F;
typedef VECTOR(int32_t, LANES) I;
typedef VECTOR(uint32_t, LANES) U;
typedef VECTOR(uint64_t, LANES / 2) U64;
typedef VECTOR(uint16_t, LANES) U16;
typedef VECTOR(int16_t, LANES) I16;

struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

template <class V> INLINE V read(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void write(void* p, V v) { memcpy(p, &v, sizeof v); }

// Prefetches `bytes` at p (any address) into a cache level (3: the nearest), perhaps to write them. The hardware
// prefetcher follows reads along a row, but not across the end of a page, and writes less well.
constexpr int PAGE = 4096;
template <int CACHE, bool TO_WRITE = false> INLINE void prefetch(uintptr_t p, int bytes) {
  for (int at = 0; at < bytes; at += 64) __builtin_prefetch((const void*)(p + at), TO_WRITE, CACHE);
}

INLINE F splat(float x) {
#if LANES == 16
  return (F)_mm512_set1_ps(x);
#elif LANES == 8
  return (F)_mm256_set1_ps(x);
#elif defined DSQ_X86
  return (F)_mm_set1_ps(x);
#elif defined __aarch64__
  return (F)vdupq_n_f32(x);
#else
  F v;
  for (int i = 0; i < LANES; i++) v[i] = x;
  return v;
#endif
}
INLINE I splat(int32_t x) { return I{} + x; }
INLINE F choose(I mask, F a, F b) { return (F)((mask & (I)a) | (~mask & (I)b)); }
INLINE I choose(I mask, I a, I b) { return (mask & a) | (~mask & b); }

INLINE I max_of(I a, I b) {
#if LANES == 16
  return (I)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8
  return (I)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif defined __aarch64__
  return (I)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
#else
  return choose(a > b, a, b);
#endif
}

INLINE U max_of(U a, U b) {
#if LANES == 16
  return (U)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif LANES == 8
  return (U)_mm256_max_epu32((__m256i)a, (__m256i)b);
#elif defined __aarch64__
  return (U)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b);
#else
  return (U)choose((I)(a > b), (I)a, (I)b);
#endif
}

// Whether any lane is not 0.
INLINE bool any(I a) {
#if LANES == 16
  return _mm512_test_epi32_mask((__m512i)a, (__m512i)a) != 0;
#elif LANES == 8
  return !_mm256_testz_si256((__m256i)a, (__m256i)a);
#elif defined DSQ_X86
  return _mm_movemask_epi8(_mm_cmpeq_epi32((__m128i)a, _mm_setzero_si128())) != 0xffff;
#elif defined __aarch64__
  return vmaxvq_u32((uint32x4_t)a) != 0;
#else
  for (int i = 0; i < LANES; i++)
    if (a[i]) return true;
  return false;
#endif
}

// The lowest byte of each lane.
INLINE void write_bytes(uint8_t* p, I a) {
#if LANES == 16
  write(p, _mm512_cvtepi32_epi8((__m512i)a));
#elif defined __aarch64__
  const uint16x8_t halves = vcombine_u16(vmovn_u32((uint32x4_t)a), vmovn_u32((uint32x4_t)a));
  write(p, vget_lane_u32((uint32x2_t)vmovn_u16(halves), 0));
#else
  write(p, __builtin_convertvector(a, VECTOR(uint8_t, LANES)));
#endif
}

// LANES bytes, each in a lane.
INLINE I widened(const uint8_t* p) {
#if LANES == 16
  return (I)_mm512_cvtepu8_epi32(read<__m128i>(p));
#elif LANES == 8
  uint64_t bytes = read<uint64_t>(p);
  return (I)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
#elif defined __aarch64__
  const uint8x8_t bytes = (uint8x8_t)vdup_n_u32(read<uint32_t>(p));
  return (I)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
#else
  return __builtin_convertvector(read<VECTOR(uint8_t, LANES)>(p), I);
#endif
}

INLINE F absolute(F x) { return (F)((I)x & 0x7fffffff); }

// x, or the bound where that is smaller (larger), or x a NaN.
INLINE F smaller(F x, F bound) {
#if LANES == 16
  return (F)_mm512_min_ps((__m512)x, (__m512)bound);
#elif LANES == 8
  return (F)_mm256_min_ps((__m256)x, (__m256)bound);
#elif defined DSQ_X86
  return (F)_mm_min_ps((__m128)x, (__m128)bound);
#elif defined __aarch64__
  return (F)vminnmq_f32((float32x4_t)x, (float32x4_t)bound);
#else
  return choose(x < bound, x, bound);
#endif
}
INLINE F larger(F x, F bound) {
#if LANES == 16
  return (F)_mm512_max_ps((__m512)x, (__m512)bound);
#elif LANES == 8
  return (F)_mm256_max_ps((__m256)x, (__m256)bound);
#elif defined DSQ_X86
  return (F)_mm_max_ps((__m128)x, (__m128)bound);
#elif defined __aarch64__
  return (F)vmaxnmq_f32((float32x4_t)x, (float32x4_t)bound);
#else
  return choose(x > bound, x, bound);
#endif
}

// The smaller magnitude, with the sign of x. A NaN may come out as anything.
INLINE F clamp(F x, F bound) {
#if LANES == 16
  return (F)_mm512_range_ps((__m512)x, (__m512)bound, 0b0010);
#else
  return smaller(larger(x, -bound), bound);
#endif
}

// x, or the bound that it passes; a NaN becomes `low`.
INLINE F between(F x, F low, F high) { return smaller(larger(x, low), high); }

// To the nearest whole number, ties to even; |x| < 2^22.
INLINE I nearest(F x) {
#if LANES == 16
  return (I)_mm512_cvtps_epi32((__m512)x);
#elif LANES == 8
  return (I)_mm256_cvtps_epi32((__m256)x);
#elif defined DSQ_X86
  return (I)_mm_cvtps_epi32((__m128)x);
#elif defined __aarch64__
  return (I)vcvtnq_s32_f32((float32x4_t)x);
#else
  const F shift = splat(0x1.8p23f);  // adding it leaves the rounded number in the low bits
  return (I)(x + shift) - (I)shift;
#endif
}

// ---- values in memory: float, bfloat16 and half, to float and back; rounding is to nearest even ----

// The lanes of a and b in turn: of their first halves, and of their second.
#if LANES == 16
#define FIRST_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST_HALVES 0, 4, 1, 5
#define SECOND_HALVES 2, 6, 3, 7
#endif

#if defined __clang__ || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

template <class V> INLINE void transpose(V (&r)[LANES]) {
#pragma GCC unroll 4
  for (int round = 1; round < LANES; round *= 2) {
    V t[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES / 2; i++) {
      t[2 * i] = SHUFFLED(r[i], r[i + LANES / 2], FIRST_HALVES);
      t[2 * i + 1] = SHUFFLED(r[i], r[i + LANES / 2], SECOND_HALVES);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) r[i] = t[i];
  }
}

INLINE F load(const float* p) { return read<F>(p); }

INLINE F load(const bf16* p) { return (F)(__builtin_convertvector(read<U16>(p), U) << 16); }

INLINE F load(const half* p) {
#if LANES == 16
  return (F)_mm512_cvtph_ps(read<__m256i>(p));
#elif LANES == 8
  return (F)_mm256_cvtph_ps(read<__m128i>(p));
#elif defined __aarch64__
  return (F)vcvt_f32_f16(read<float16x4_t>(p));
#else
  U h = __builtin_convertvector(read<U16>(p), U);
  U magnitude = (h & 0x7fff) << 13;
  F scaled = (F)magnitude * splat(0x1p112f);  // rebiases the exponent, subnormals included
  I special = (I)magnitude >= splat(0x0f800000);
  return (F)((U)choose(special, (I)(magnitude | 0x7f800000), (I)scaled) | ((h & 0x8000) << 16));
#endif
}

INLINE void store(float* p, F x) { write(p, x); }

// In the upper half of each lane, the value as bfloat16.
INLINE U round_to_bf16(U x) { return x + 0x7fff + ((x >> 16) & 1); }

// In the lower half of each lane, the value as half.
INLINE U half_bits(F x) {
#if LANES == 16
  return (U)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif LANES == 8
  return (U)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined __aarch64__
  return (U)vmovl_u16((uint16x4_t)vcvt_f16_f32((float32x4_t)x));
#else
  U u = (U)x & 0x7fffffff, sign = (U)x >> 31 << 15;
  U normal = (u + 0xc8000fff + ((u >> 13) & 1)) >> 13;
  U tiny = (U)((F)u + splat(0.5f)) - (U)splat(0.5f);  // 0.5's last bit is half's smallest subnormal
  I h = choose((I)u < splat(0x38800000), (I)tiny, (I)normal);
  h = choose((I)u >= splat(0x477ff000), splat(0x7c00), h);
  h = choose((I)u > splat(0x7f800000), splat(0x7e00), h);
  return (U)h | sign;
#endif
}

// The upper halves of the lanes of a, then those of b, as 16-bit values.
INLINE U upper_halves(U a, U b) {
#if LANES == 16
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                       31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (U)_mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
#elif LANES == 8
  const __m256i pairs = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
  return (U)_mm256_permute4x64_epi64(pairs, 0xd8);
#elif defined DSQ_X86
  return (U)_mm_packs_epi32(_mm_srai_epi32((__m128i)a, 16), _mm_srai_epi32((__m128i)b, 16));
#elif defined __aarch64__
  return (U)vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b);
#else
  U16 halves[2] = {__builtin_convertvector(a >> 16, U16), __builtin_convertvector(b >> 16, U16)};
  return read<U>(halves);
#endif
}

// Stores past the caches, which saves reading the overwritten memory. p is aligned to the size of the stored value.
INLINE void stream(void* p, U x) {
#if LANES == 16
  _mm512_stream_si512((__m512i*)p, (__m512i)x);
#elif LANES == 8
  _mm256_stream_si256((__m256i*)p, (__m256i)x);
#elif defined DSQ_X86
  _mm_stream_si128((__m128i*)p, (__m128i)x);
#else
  write(p, x);
#endif
}
INLINE void stream(float* p, F x) { stream((void*)p, (U)x); }

INLINE void end_of_streams() {
#ifdef DSQ_X86
  _mm_sfence();
#endif
}

// ---- exponents ----

INLINE I magnitude_bits(F x) { return (I)x & 0x7fffffff; }

// The bits of a where the mask has them, else of b.
INLINE U pick(U a, U b, uint32_t mask) {
#if LANES == 16
  return (U)_mm512_ternarylogic_epi32(_mm512_set1_epi32((int)mask), (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & mask) | (b & ~mask);
#endif
}

// The stored exponents of four blocks, in the four bytes of each lane, from the lane-wise maxima of their magnitudes, or
// from their values where a block is one vector.
INLINE U exponent_bytes(I a, I b, I c, I d) {
  const U bytes = pick((U)a >> 23, (U)b >> 15, 0xff);
  return pick(pick(bytes, (U)c >> 7, 0xffff), (U)d << 1, 0xffffff);
}

// A key that orders values by magnitude, and of two equal magnitudes the positive above the negative.
INLINE U signed_key(F x) {
#if LANES == 16
  return (U)_mm512_rol_epi32((__m512i)x, 1) ^ 1;
#else
  return ((U)x << 1 | (U)x >> 31) ^ 1;
#endif
}

#if LANES == 16
INLINE U max_of_bytes(U a, U b) { return (U)_mm512_max_epu8((__m512i)a, (__m512i)b); }
#define UNPACKED(half, bits, a, b) (U)_mm512_unpack##half##_epi##bits((__m512i)(a), (__m512i)(b))
#elif LANES == 8
INLINE U max_of_bytes(U a, U b) { return (U)_mm256_max_epu8((__m256i)a, (__m256i)b); }
#define UNPACKED(half, bits, a, b) (U)_mm256_unpack##half##_epi##bits((__m256i)(a), (__m256i)(b))
#endif
#if LANES >= 8
// Within each 128 bits: lane i is the largest lane of vector i.
template <U (*MAX)(U, U)> INLINE U largest_in_turn(U a, U b, U c, U d) {
  const U ab = MAX(UNPACKED(lo, 32, a, b), UNPACKED(hi, 32, a, b)), cd = MAX(UNPACKED(lo, 32, c, d), UNPACKED(hi, 32, c, d));
  return MAX(UNPACKED(lo, 64, ab, cd), UNPACKED(hi, 64, ab, cd));
}
#undef UNPACKED
#endif

// Of four vectors: each one's largest lane in lane i of 128 bits, which largest_of_parts is to compare.
INLINE U largest_lanes(U a, U b, U c, U d) {
#if LANES >= 8
  return largest_in_turn<max_of>(a, b, c, d);
#elif defined __aarch64__
  const uint32x4_t ab = vpmaxq_u32((uint32x4_t)a, (uint32x4_t)b), cd = vpmaxq_u32((uint32x4_t)c, (uint32x4_t)d);
  return (U)vpmaxq_u32(ab, cd);
#else
  const U each[4] = {a, b, c, d};
  U most{};
  for (int g = 0; g < 4; g++)
    for (int i = 0; i < LANES; i++) most[g] = each[g][i] > most[g] ? each[g][i] : most[g];
  return most;
#endif
}

// The largest of the 128 bits of each of four vectors, lane by lane.
INLINE void largest_of_parts(const U x[4], uint32_t most[16]) {
#if LANES == 16
  const auto of_two = [](U a, U b) ALWAYS {
    return max_of((U)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x44), (U)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xee));
  };
  const __m512i ab = (__m512i)of_two(x[0], x[1]), cd = (__m512i)of_two(x[2], x[3]);
  write(most, max_of((U)_mm512_shuffle_i32x4(ab, cd, 0x88), (U)_mm512_shuffle_i32x4(ab, cd, 0xdd)));
#elif LANES == 8
  for (int i = 0; i < 4; i += 2) {
    const __m256i a = (__m256i)x[i], b = (__m256i)x[i + 1];
    write(most + 4 * i, max_of((U)_mm256_permute2x128_si256(a, b, 0x20), (U)_mm256_permute2x128_si256(a, b, 0x31)));
  }
#else
  for (int i = 0; i < 4; i++) write(most + 4 * i, x[i]);
#endif
}

// The largest of all lanes of each of four vectors, byte by byte.
INLINE void largest_bytes(const U x[4], uint32_t most[4]) {
#if LANES >= 8
  const U each = largest_in_turn<max_of_bytes>(x[0], x[1], x[2], x[3]);
#if LANES == 16
  const __m256i y = _mm256_max_epu8(_mm512_castsi512_si256((__m512i)each), _mm512_extracti64x4_epi64((__m512i)each, 1));
#else
  const __m256i y = (__m256i)each;
#endif
  write(most, _mm_max_epu8(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
#else
  for (int v = 0; v < 4; v++) {
#ifdef DSQ_X86
    __m128i y = (__m128i)x[v];
    y = _mm_max_epu8(y, _mm_srli_si128(y, 8));
    y = _mm_max_epu8(y, _mm_srli_si128(y, 4));
    most[v] = (uint32_t)_mm_cvtsi128_si32(y);
#elif defined __aarch64__
    uint8x16_t y = (uint8x16_t)x[v];
    y = vmaxq_u8(y, vextq_u8(y, y, 8));
    y = vmaxq_u8(y, vextq_u8(y, y, 4));
    most[v] = vgetq_lane_u32((uint32x4_t)y, 0);
#else
    uint8_t byte[4 * LANES], largest[4] = {};
    memcpy(byte, &x[v], sizeof byte);
    for (int i = 0; i < 4 * LANES; i++)
      if (byte[i] > largest[i % 4]) largest[i % 4] = byte[i];
    most[v] = (uint32_t)largest[3] << 24 | (uint32_t)largest[2] << 16 | (uint32_t)largest[1] << 8 | largest[0];
#endif
  }
#endif
}

INLINE uint32_t largest_lane(I a) {
  int32_t lane[LANES], most = 0;
  memcpy(lane, &a, sizeof lane);
  for (int i = 0; i < LANES; i++) most = lane[i] > most ? lane[i] : most;
  return (uint32_t)most;
}

}  // namespace
