// Packing codes into the integer GEMM's panels: codes of at most 8 bits as int8, four to an element, wider ones as
// int16, two to an element. A step is one index of the contraction.
#pragma once

#include "packed.h"
#include "../packing.h"

namespace {

constexpr int PANEL = TILE_COLUMNS;   // vectors of a panel
constexpr int VECTOR_ELEMENTS = 128;  // of 32 bits: a panel's 16 KiB stay in the first-level cache
constexpr int RUN = 64;               // steps of a run; else it is all of the vector's, or a block
constexpr int ROWS_AHEAD = 32;        // rows of codes that are prefetched before they are read: the hardware's own
                                      // prefetcher does not follow the jumps from row to row

// Steps of an element, and of a vector in a panel.
template <bool int8> constexpr int PER_ELEMENT = int8 ? 4 : 2;
template <bool int8> constexpr int STEPS = VECTOR_ELEMENTS * PER_ELEMENT<int8>;

// A packed operand on its way into panels.
struct IntegerOperand : PackedVectors {
  bool folded = false;  // signs and mantissas of its scales are multiplied into the panels' integers

  // Of a block of `steps` steps, those that the microkernel reads: whole runs, or blocks where these are longer.
  int steps_read(int steps) const {
    const int whole = block_size < RUN ? RUN : block_size;
    return (int)ceil_div(steps, whole) * whole;
  }
  // The bits that a folded panel's integers need: a mantissa is 15 at most, so that the code of largest magnitude may
  // change its sign.
  int folded_bits() const { return bits + 4; }
  bool has_powers() const { return kind == POWER || folded; }  // its scales are powers of two, without a sign
  int integer_bits() const { return folded ? folded_bits() : bits; }
};

// 16 codes of any width in 32-bit lanes; zeros after `count` of them.
inline __m512i codes32(const uint8_t* from, int count, int bits) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bit = _mm512_mullo_epi32(lane, _mm512_set1_epi32(bits));
  const __m512i word = _mm512_srli_epi32(bit, 4);  // a code lies in this 16-bit word and the next
  const __m512i words = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(1)), 16));
  const __m512i left = _mm512_sub_epi32(_mm512_set1_epi32(32 - bits), _mm512_and_si512(bit, _mm512_set1_epi32(15)));
  const __mmask32 stored_bytes = first32((int)ceil_div(least(count, 16) * bits, 8));
  const __m512i stored = _mm512_zextsi256_si512(_mm256_maskz_loadu_epi8(stored_bytes, from));
  const __m512i top = _mm512_sllv_epi32(_mm512_permutexvar_epi16(words, stored), left);
  return _mm512_maskz_srav_epi32(first16(count), top, _mm512_set1_epi32(32 - bits));
}

// The integers that elements of a grid with so many digits are in its finest step.
inline __m512i integers_of(__m512i elements, int bits, int digits) {
  const __m512i place = _mm512_and_si512(elements, _mm512_set1_epi16((short)((1 << (bits - 1)) - 1)));
  const __m512i binade = _mm512_srl_epi16(place, _mm_cvtsi32_si128(digits)), sign = _mm512_srai_epi16(elements, 15);
  const __m512i last = _mm512_and_si512(place, _mm512_set1_epi16((short)((1 << digits) - 1)));
  const __m512i leading = _mm512_maskz_set1_epi16(_mm512_test_epi16_mask(binade, binade), (short)(1 << digits));
  const __m512i shift = _mm512_subs_epu16(binade, _mm512_set1_epi16(1));
  const __m512i magnitude = _mm512_sllv_epi16(_mm512_or_si512(last, leading), shift);
  return _mm512_sub_epi16(_mm512_xor_si512(magnitude, sign), sign);
}

// 32 codes as 16-bit integers, from a byte's first bit on; zeros after `count` of them. `digits`: see PackedOperand.
inline __m512i codes16(const uint8_t* from, int count, int bits, int digits = 0) {
  const int bytes = (int)ceil_div(least(count, 32) * bits, 8);
  if (bits == 16) return _mm512_maskz_loadu_epi16(first32(count), from);
  __m512i codes;
  if (bits == 8) {
    codes = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(bytes), from));
  } else if (bits == 4) {
    // a byte in both halves of a lane, then each half's nibble to its top and back
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(twice, _mm512_set1_epi32(8 << 16 | 12)), 12);
  } else if (bits == 2) {
    const __m512i lanes = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi64(lanes, 16));
    const __m512i four = _mm512_or_si512(twice, _mm512_slli_epi64(twice, 32));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(four, _mm512_set1_epi64(8LL << 48 | 10LL << 32 | 12 << 16 | 14)), 14);
  } else {
    const __m256i low = _mm512_cvtepi32_epi16(codes32(from, count, bits));
    const __m256i high = _mm512_cvtepi32_epi16(codes32(from + 2 * bits, count - 16, bits));
    codes = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  if (digits) codes = integers_of(codes, bits, digits);
  return _mm512_maskz_mov_epi16(first32(count), codes);
}

// 64 codes of at most 8 bits as bytes; zeros after `count` of them.
inline __m512i codes8(const uint8_t* from, int count, int bits, int digits = 0) {
  if (bits == 8 && !digits) return _mm512_maskz_loadu_epi8(first64(count), from);
  if (bits == 4 && digits <= 1) {
    // a byte in a lane of two, and its nibbles apart: each looks its code up, an integer or an element of E2M1
    const __m512i lanes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first32((count + 1) / 2), from));
    const __m512i nibbles = _mm512_or_si512(lanes, _mm512_slli_epi16(lanes, 4));
    const __m128i codes = digits ? _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
                                 : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_maskz_shuffle_epi8(first64(count), _mm512_broadcast_i32x4(codes),
                                     _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
  }
  const __m256i low = _mm512_cvtepi16_epi8(codes16(from, count, bits, digits));
  const __m256i high = _mm512_cvtepi16_epi8(codes16(from + 4 * bits, count - 32, bits, digits));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// 16 elements of a row of codes of x, from code `first` (a multiple of 32) on; zeros after `count` codes.
template <bool int8> __m512i elements_of(const IntegerOperand& x, const uint8_t* row, int64_t first, int count) {
  if (count <= 0) return __m512i();
  const uint8_t* from = row + first / 8 * x.code_bits;
  if constexpr (int8) return codes8(from, count, x.code_bits, x.digits);
  else return codes16(from, count, x.code_bits, x.digits);
}

// 32 vectors' codes at two steps of the depth, as bytes side by side.
inline __m512i byte_pairs(__m512i even, __m512i odd) {
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, _mm512_slli_epi16(odd, 8));
}

// Packs the codes of at most PANEL vectors from `vector` on, over `depth` steps from k on, for B: element by element.
// Zeros after them, as far as the microkernel reads.
template <bool int8> void pack_b(const IntegerOperand& x, int64_t vector, int64_t k, int depth, uint32_t* panel) {
  constexpr int per_element = PER_ELEMENT<int8>;
  const int vectors = least(PANEL, x.vectors - vector);
  const int64_t row_bytes = x.row_bytes();
  if (x.across) {
    const uint8_t* row = x.codes + k * row_bytes;
    auto codes = [&](int i) {
      __builtin_prefetch(row + (i + ROWS_AHEAD) * row_bytes + vector / 8 * x.code_bits);
      return elements_of<false>(x, row + i * row_bytes, vector, i < depth ? vectors : 0);
    };
    if constexpr (int8)
      pack_steps<PANEL>([&](int i) { return byte_pairs(codes(2 * i), codes(2 * i + 1)); }, (depth + 1) / 2, panel);
    else pack_steps<PANEL>(codes, depth, panel);
  } else {
    const uint8_t* row = x.codes + vector * row_bytes;
    pack_vectors<PANEL>(
        [&](int i, int first) {
          if (i >= vectors) return __m512i();
          const uint8_t* codes = row + i * row_bytes;
          __builtin_prefetch(codes + PANEL * row_bytes + (k + first * per_element) / 8 * x.code_bits);  // the next panel's
          return elements_of<int8>(x, codes, k + first * per_element, depth - first * per_element);
        },
        (int)ceil_div(depth, per_element), panel);
  }
  const int64_t filled = ceil_div(depth, per_element);
  memset(panel + filled * PANEL, 0, (size_t)(4 * (x.steps_read(depth) / per_element - filled) * PANEL));
}

// The same for A: one vector after another.
template <bool int8> void pack_a(const IntegerOperand& x, int64_t vector, int64_t k, int depth, uint32_t* to) {
  constexpr int per_element = PER_ELEMENT<int8>;
  const int vectors = least(PANEL, x.vectors - vector), used = (int)(ceil_div(depth, x.block_size) * x.block_size / per_element);
  if (!x.across) {
    const uint8_t* row = x.codes + vector * x.row_bytes();
    for (int i = 0; i < vectors; i++, row += x.row_bytes(), to += VECTOR_ELEMENTS) {
      const uint8_t* ahead = row + ROWS_AHEAD * x.row_bytes() + k / 8 * x.code_bits;
      for (int at = 0; at < ceil_div(depth * x.code_bits, 8); at += 64) __builtin_prefetch(ahead + at);
      for (int e = 0; e < used; e += 16)
        _mm512_storeu_si512(to + e, elements_of<int8>(x, row, k + e * per_element, depth - e * per_element));
    }
    return;
  }
  alignas(64) uint32_t panel[PANEL * VECTOR_ELEMENTS];
  pack_b<int8>(x, vector, k, depth, panel);
  for (int first = 0; first < vectors; first += 16)
    for (int at = 0; at < used; at += 16) {
      __m512i r[16];
      for (int e = 0; e < 16; e++)
        r[e] = at + e < used ? _mm512_load_si512(panel + (at + e) * PANEL + first) : _mm512_setzero_si512();
      transpose16(r);
      for (int i = 0; i < 16 && first + i < vectors; i++)
        _mm512_storeu_si512(to + (first + i) * VECTOR_ELEMENTS + at, r[i]);
    }
}

}  // namespace
