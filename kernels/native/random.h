// The random numbers of stochastic rounding: Philox4x32-7, laid out as kernels/philox.py says.
#pragma once

#include "steps.h"

namespace {

INLINE U64 multiply_low_halves(U64 a, U64 b) {
#if LANES == 16
  return (U64)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif LANES == 8
  return (U64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined DSQ_X86
  return (U64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

INLINE U64 even_numbers() {
  U64 even = {};
  for (int i = 0; i < LANES / 2; i++) even[i] = 2 * (uint64_t)i;
  return even;
}

// A step's random numbers. Columns 16j..16j+15 own the low (j even) or high (j odd) halves of words[j / 2]. What is
// kept of a number k is 2^16 - 1 - k, which rounding has more use for.
struct Numbers {
  alignas(64) uint32_t words[2][16];

  // 2^16 - 1 - k of a unit's columns; the uniform number is (k + 1/2) / 2^16.
  INLINE U complement(int unit) const {
    const int column = unit * LANES;
    const U word = read<U>(words[column / 32] + column % 16);
    return column / 16 % 2 ? word >> 16 : word & 0xffff;
  }
};

// Chunks' numbers that are drawn before any is used.
constexpr int SLOTS = 16;

struct Random {
  static constexpr int ROUNDS = 7;
  static constexpr uint64_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;

  uint64_t keys[2 * ROUNDS];
  Numbers drawn[SLOTS][CHUNK / STEP];

  explicit Random(uint64_t seed) {
    for (int round = 0; round < ROUNDS; round++) {
      keys[2 * round] = (uint32_t)seed + round * 0x9E3779B9u;
      keys[2 * round + 1] = (uint32_t)(seed >> 32) + round * 0xBB67AE85u;
    }
  }

  // Each 32-bit word of a counter rides in the low half of a 64-bit lane, even and odd counters apart, so that the
  // multiplier finds it there; what is left in the high half it ignores.
  INLINE void draw(int slot, int64_t row, int64_t block) {
    // The first counter words differ by lane alone, the others by row alone: so do the first two rounds' words.
    const uint64_t first1 = (uint64_t)(uint32_t)((uint64_t)row >> 32) * MULTIPLIER_1;
    const uint64_t second0 = (uint32_t)((first1 >> 32) ^ (uint64_t)row ^ keys[0]), second1 = (uint32_t)first1;
    const uint64_t second_product = second0 * MULTIPLIER_0;
    for (int first = 0; first < 16; first += LANES) {
      U64 parts[2][4];
      for (int odd = 0; odd < 2; odd++) {
        const U64 counter = even_numbers() + (uint64_t)(16 * block + first + odd);
        const U64 first0 = multiply_low_halves(counter, U64{} + MULTIPLIER_0);
        const U64 second_other = multiply_low_halves((first0 >> 32) ^ keys[1], U64{} + MULTIPLIER_1);
        U64 c0 = (second_other >> 32) ^ (second1 ^ keys[2]), c1 = second_other;
        U64 c2 = first0 ^ ((second_product >> 32) ^ keys[3]), c3 = U64{} + second_product;
#pragma GCC unroll 7
        for (int round = 2; round < ROUNDS; round++) {
          U64 p0 = multiply_low_halves(c0, U64{} + MULTIPLIER_0), p1 = multiply_low_halves(c2, U64{} + MULTIPLIER_1);
          c0 = (p1 >> 32) ^ c1 ^ keys[2 * round];
          c1 = p1;
          c2 = (p0 >> 32) ^ c3 ^ keys[2 * round + 1];
          c3 = p0;
        }
        parts[odd][0] = c0, parts[odd][1] = c1, parts[odd][2] = c2, parts[odd][3] = c3;
      }
      for (int w = 0; w < 4; w++)
        write(drawn[slot][w / 2].words[w % 2] + first, ~((parts[0][w] & 0xffffffff) | (parts[1][w] << 32)));
    }
  }
};

}  // namespace
