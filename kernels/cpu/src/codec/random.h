// The random numbers of stochastic rounding: Philox4x32-7, laid out as kernels/reference/codec.py says.
#pragma once

#include "tile.h"

namespace {

INLINE U64 multiply_low_halves(U64 a, U64 b) {
#if LANES == 16
  return (U64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif LANES == 8
  return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined DSQ_X86
  return (U64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined __aarch64__
  return (U64)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

INLINE U64 even_numbers() {
  U64 even = {};
  for (int i = 0; i < LANES / 2; i++) even[i] = 2 * (uint64_t)i;
  return even;
}

// The low halves of `even`'s and of `odd`'s 64-bit lanes, in turn.
INLINE U64 interleave_low_halves(U64 even, U64 odd) {
#if LANES == 16
  return (U64)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, (_MM_PERM_ENUM)0xa0);
#elif LANES == 8
  return (U64)_mm256_blend_epi32((__m256i)even, _mm256_shuffle_epi32((__m256i)odd, 0xa0), 0xaa);
#elif defined __aarch64__
  return (U64)vtrn1q_u32((uint32x4_t)even, (uint32x4_t)odd);
#else
  return (even & 0xffffffff) | (odd << 32);
#endif
}

// A tile's random numbers. Columns 16j..16j+15 own the low (j even) or high (j odd) halves of words[j / 2]. A number k
// is stored as 2^16 - 1 - k, the form that rounding needs.
struct Numbers {
  alignas(64) uint32_t words[2][16];

  // 2^16 - 1 - k of a vector's columns; the uniform number is (k + 1/2) / 2^16.
  INLINE U complement(int vector) const {
    const int column = vector * LANES;
    const U word = read<U>(words[column / 32] + column % 16);
    return column / 16 % 2 ? word >> 16 : word & 0xffff;
  }
};

struct Random {
  static constexpr int ROUNDS = 7;
  static constexpr uint64_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;

  // The first counter words differ by lane alone, the others by row alone: so each word that the third round begins
  // with is a part that differs by lane, one that differs by row, or the exclusive or of both. These are the lanes'.
  // Each 32-bit word of a counter rides in the low half of a 64-bit lane, even and odd counters apart, so that the
  // multiplier finds it there. The multiplier ignores the high half.
  struct Start {
    U64 c0, c1, c2;
  };

  uint64_t keys[2 * ROUNDS];
  Start starts[BATCH][16 / LANES][2];
  Numbers drawn[BATCH][CHUNK / TILE];  // before any is used

  explicit Random(uint64_t seed) {
    for (int round = 0; round < ROUNDS; round++) {
      const uint32_t complement = round == ROUNDS - 1 ? ~0u : 0;  // the form in which the numbers are stored
      keys[2 * round] = ((uint32_t)seed + round * 0x9E3779B9u) ^ complement;
      keys[2 * round + 1] = ((uint32_t)(seed >> 32) + round * 0xBB67AE85u) ^ complement;
    }
  }

  // Prepares `start` for drawing the numbers of a block's rows.
  INLINE void begin(int start, int64_t block) {
    for (int part = 0; part < 16 / LANES; part++)
      for (int odd = 0; odd < 2; odd++) {
        const U64 counter = even_numbers() + (uint64_t)(16 * block + part * LANES + odd);
        const U64 first0 = multiply_low_halves(counter, U64{} + MULTIPLIER_0);
        const U64 second1 = multiply_low_halves((first0 >> 32) ^ keys[1], U64{} + MULTIPLIER_1);
        starts[start][part][odd] = {second1 >> 32, second1, first0};
      }
  }

  // A row's numbers, of the block that `start` was begun with.
  INLINE void draw(int slot, int start, int64_t row) {
    const uint64_t first1 = (uint64_t)(uint32_t)((uint64_t)row >> 32) * MULTIPLIER_1;
    const uint64_t second0 = (uint64_t)(uint32_t)((first1 >> 32) ^ (uint64_t)row ^ keys[0]) * MULTIPLIER_0;
    for (int part = 0; part < 16 / LANES; part++) {
      U64 parts[2][4];
      for (int odd = 0; odd < 2; odd++) {
        const Start& from = starts[start][part][odd];
        U64 c0 = from.c0 ^ ((uint32_t)first1 ^ keys[2]), c1 = from.c1;
        U64 c2 = from.c2 ^ ((second0 >> 32) ^ keys[3]), c3 = U64{} + second0;
#pragma GCC unroll 7
        for (int round = 2; round < ROUNDS; round++) {
          U64 p0 = multiply_low_halves(c0, U64{} + MULTIPLIER_0), p1 = multiply_low_halves(c2, U64{} + MULTIPLIER_1);
          c0 = (p1 >> 32) ^ c1 ^ keys[2 * round];
          c1 = p1;
          c2 = (p0 >> 32) ^ c3 ^ keys[2 * round + 1];
          c3 = p0;
        }
        parts[odd][0] = c0, parts[odd][1] = ~c1, parts[odd][2] = c2, parts[odd][3] = ~c3;
      }
      for (int w = 0; w < 4; w++)
        write(drawn[slot][w / 2].words[w % 2] + part * LANES, interleave_low_halves(parts[0][w], parts[1][w]));
    }
  }
};

}  // namespace
