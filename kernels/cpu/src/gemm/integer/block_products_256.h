// The integer GEMM on 256-bit vectors. The including file defines how the codes of a block are multiplied.
#pragma once

#define LANES 8
#include "block_products.h"

namespace {

INLINE __m256i element_of(const int8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
INLINE __m256i element_of_all(const int8_t* row) {
  int32_t codes;
  memcpy(&codes, row, sizeof codes);
  return _mm256_set1_epi32(codes);
}
INLINE __m256i added_pairs(__m256i sums, int16_t times = 1) {
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(times));
}

// Whether codes multiply as bytes, A's grown by half their range; else as integers of 16 bits.
bool as_bytes(int a_bits, int b_bits, int block_size);

// The dot products of ROWS rows and PANEL columns over a block, which has `groups` groups of GROUP elements. All rows take
// a vector of columns when it is loaded: their sums, 8 of the 16 registers, leave it room.
template <class Code, int GROUP>
void multiply_block(const int8_t* rows, const int8_t* columns, int groups, __m256i (&dots)[ROWS][2]);

// A block has a group of GROUP elements, or, unless ONE, several.
template <class Code, int GROUP, bool ONE> void microkernel(const BlockTile& tile) {
  const int8_t *a = tile.a, *b = tile.b;
  const float *a_scales = tile.a_scales, *b_scales = tile.b_scales, *b_offsets = tile.b_offsets;
  const int groups = ONE ? 1 : tile.elements / GROUP, block_size = groups * GROUP * ELEMENTS_SIZE;
  float row[PANEL] = {};
  if (tile.bias) memcpy(row, tile.bias, sizeof(float) * (size_t)tile.columns);
  __m256 sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) sums[r][0] = _mm256_loadu_ps(row), sums[r][1] = _mm256_loadu_ps(row + 8);
  for (int64_t index = 0; index < tile.blocks; index++) {
    __m256i dots[ROWS][2];
    multiply_block<Code, GROUP>(a, b, groups, dots);
    for (int half = 0; half < 2; half++) {
      const __m256 b_scale = _mm256_loadu_ps(b_scales + half * 8);
      __m256 b_offset = b_scale;
      if constexpr (sizeof(Code) == 1) b_offset = _mm256_loadu_ps(b_offsets + half * 8);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const __m256 dot = _mm256_cvtepi32_ps(dots[r][half]);
        const __m256 scaled = sizeof(Code) == 1 ? _mm256_fmsub_ps(dot, b_scale, b_offset) : _mm256_mul_ps(dot, b_scale);
        sums[r][half] = _mm256_fmadd_ps(scaled, _mm256_broadcast_ss(a_scales + r), sums[r][half]);
      }
    }
    a += block_size, b += block_size, a_scales += PANEL, b_scales += PANEL, b_offsets += PANEL;
  }
  float* c = tile.c;
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++, c += tile.stride) {
    if (r == tile.rows) return;
    float* const to = tile.columns == PANEL ? c : row;
    _mm256_storeu_ps(to, sums[r][0]);
    _mm256_storeu_ps(to + 8, sums[r][1]);
    if (to == row) memcpy(c, row, sizeof(float) * (size_t)tile.columns);
  }
}

// The microkernel for blocks of so many elements; a block of 16 codes has one of its own.
template <class Code> auto microkernel_for(int elements) {
  return elements == 16 / STEPS<Code> ? microkernel<Code, 16 / STEPS<Code>, true>
         : elements % 4 == 0          ? microkernel<Code, 4, false>
         : elements % 2 == 0          ? microkernel<Code, 2, false>
                                      : microkernel<Code, 1, false>;
}

// The change of a block's dot products: `more`, by which A's codes have grown, times the sum of B's.
void offset(int more, int elements, const int8_t* codes, float* to) {
  __m256i sums[2] = {};
  for (int e = 0; e < 2 * elements; e++, codes += 32) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), element_of(codes));
    sums[e % 2] = _mm256_add_epi32(sums[e % 2], added_pairs(pairs, (int16_t)more));
  }
  for (int half = 0; half < 2; half++) _mm256_storeu_ps(to + half * 8, _mm256_cvtepi32_ps(sums[half]));
}

bool fits(int, int, int block_size) { return block_size % STEPS<int16_t> == 0; }

int64_t scratch_size(GemmSize size, int a_bits, int b_bits, int block_size) {
  return as_bytes(a_bits, b_bits, block_size) ? panels_size<int8_t, true>(size, block_size) : panels_size<int16_t, false>(size, block_size);
}

void gemm(const PackedOperand& a, const PackedOperand& b, bool one_scale, int block_size, const float* bias, const Result& c,
          GemmSize size, uint32_t* scratch, int threads) {
  if (as_bytes(a.bits, b.bits, block_size))
    multiply<int8_t, true>(a, b, one_scale, block_size, bias, c, size, scratch, threads,
                           microkernel_for<int8_t>(block_size / STEPS<int8_t>), offset);
  else
    multiply<int16_t, false>(a, b, one_scale, block_size, bias, c, size, scratch, threads,
                             microkernel_for<int16_t>(block_size / STEPS<int16_t>), offset);
}

}  // namespace
