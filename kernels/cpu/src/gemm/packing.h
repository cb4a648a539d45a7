// Packing into panels, the order in which a GEMM's microkernel reads its operands (AVX-512). A panel holds `width`
// vectors (rows of A, columns of B) over some steps of the contraction, in elements of 32 bits: two steps' values of 16
// bits, or four steps' of 8, as the dot-product instructions take them. One element of every vector, then the next.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../division.h"

namespace {

inline int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }
inline int greatest(int64_t a, int64_t b) { return (int)(a < b ? b : a); }
inline __mmask16 first16(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }
inline __mmask32 first32(int count) { return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1; }
inline __mmask64 first64(int count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

// From memory whose rows hold one step of every vector: row(k) gives 32 vectors' values of 16 bits at step k, zeros
// past the last vector.
template <int width, class Row> inline void pack_steps(const Row& row, int depth, uint32_t* panel) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int k = 0; k < depth; k += 2, panel += width) {
    const __m512i even = row(k), odd = k + 1 < depth ? row(k + 1) : _mm512_setzero_si512();
    _mm512_mask_storeu_epi32(panel, first16(width), _mm512_permutex2var_epi16(even, low, odd));
    if (width <= 16) continue;
    _mm512_mask_storeu_epi32(panel + 16, first16(width - 16), _mm512_permutex2var_epi16(even, high, odd));
  }
}

inline void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}

inline void transpose16_bytes(__m128i r[16]) {
  for (int round = 0; round < 4; round++) {
    __m128i t[16];
    for (int i = 0; i < 8; i++) {
      t[2 * i] = _mm_unpacklo_epi8(r[i], r[i + 8]);
      t[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + 8]);
    }
    memcpy(r, t, sizeof t);
  }
}

// From memory whose rows hold one vector: vector(i, first) gives 16 elements of vector i from element `first` on, zeros
// past its last.
template <int width, class Vector> inline void pack_vectors(const Vector& vector, int elements, uint32_t* panel) {
  for (int first = 0; first < width; first += 16) {
    const __mmask16 stored = first16(width - first);
    for (int at = 0; at < elements; at += 16) {
      __m512i r[16];
      for (int i = 0; i < 16; i++) r[i] = vector(first + i, at);
      transpose16(r);
      for (int e = 0; e < 16 && at + e < elements; e++)
        _mm512_mask_storeu_epi32(panel + (at + e) * width + first, stored, r[e]);
    }
  }
}

}  // namespace
