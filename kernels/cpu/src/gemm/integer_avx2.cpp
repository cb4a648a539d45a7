// The integer GEMM on AVX2, whose dot products of bytes are sums of 16 bits: narrow codes leave them room for the 8
// products of a lane in 16 steps.
#define LANES 8
#include "box_products.h"

namespace {

// Of both codes: a lane's 8 products in a group of 4 elements, of 2^a - 1 and 2^(b - 1) at most, fit 16 bits.
constexpr int MOST_BITS = 13;

INLINE __m256i element_of(const int8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
INLINE __m256i added_pairs(__m256i sums, int16_t times = 1) {
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(times));
}

// Of one row and PANEL columns: the sums in 16 bits of the products of GROUP elements.
template <int GROUP> INLINE void dot(const int8_t* row, const int8_t* columns, __m256i (&sums)[2]) {
#pragma GCC unroll 4
  for (int e = 0; e < GROUP; e++, row += ELEMENTS_SIZE, columns += ELEMENTS_SIZE) {
    int32_t codes;
    memcpy(&codes, row, sizeof codes);
    for (int half = 0; half < 2; half++) {
      const __m256i products = _mm256_maddubs_epi16(_mm256_set1_epi32(codes), element_of(columns + half * 32));
      sums[half] = e ? _mm256_add_epi16(sums[half], products) : products;
    }
  }
}

// A box has a group of GROUP elements, or, unless ONE, several.
template <int GROUP, bool ONE> void microkernel(const BoxTile& tile) {
  constexpr int group_size = GROUP * ELEMENTS_SIZE;
  const int8_t *a = tile.a, *b = tile.b;
  const float *a_scales = tile.a_scales, *b_scales = tile.b_scales, *b_offsets = tile.b_offsets;
  const int groups = ONE ? 1 : tile.elements / GROUP;
  float row[PANEL] = {};
  if (tile.bias) memcpy(row, tile.bias, sizeof(float) * (size_t)tile.columns);
  __m256 sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) sums[r][0] = _mm256_loadu_ps(row), sums[r][1] = _mm256_loadu_ps(row + 8);
  for (int64_t box = 0; box < tile.boxes; box++) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      __m256i dots[2], more[2];
      dot<GROUP>(a + r * ELEMENT, b, dots);
      for (int half = 0; half < 2; half++) dots[half] = added_pairs(dots[half]);
      for (int group = 1; group < groups; group++) {
        dot<GROUP>(a + r * ELEMENT + group * group_size, b + group * group_size, more);
        for (int half = 0; half < 2; half++) dots[half] = _mm256_add_epi32(dots[half], added_pairs(more[half]));
      }
      const __m256 scale = _mm256_broadcast_ss(a_scales + r);
      for (int half = 0; half < 2; half++) {
        const __m256 b_scale = _mm256_loadu_ps(b_scales + half * 8), offset = _mm256_loadu_ps(b_offsets + half * 8);
        const __m256 scaled = _mm256_fmsub_ps(_mm256_cvtepi32_ps(dots[half]), b_scale, offset);
        sums[r][half] = _mm256_fmadd_ps(scaled, scale, sums[r][half]);
      }
    }
    a += groups * group_size, b += groups * group_size, a_scales += PANEL, b_scales += PANEL, b_offsets += PANEL;
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

// What A's codes have grown by, times the sum of B's over a box.
void offset(int more, int elements, const int8_t* codes, float* to) {
  __m256i sums[2] = {};
  for (int e = 0; e < 2 * elements; e++, codes += 32) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), element_of(codes));
    sums[e % 2] = _mm256_add_epi32(sums[e % 2], added_pairs(pairs, (int16_t)more));
  }
  for (int half = 0; half < 2; half++) _mm256_storeu_ps(to + half * 8, _mm256_cvtepi32_ps(sums[half]));
}

bool usable() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool fits(int a_bits, int b_bits, int box) {
  return a_bits <= 8 && b_bits <= 8 && a_bits + b_bits <= MOST_BITS && box % ELEMENT == 0;
}

void gemm(const PackedOperand& a, const PackedOperand& b, bool one_scale, int box, const float* bias, const Result& c,
          GemmSize size, uint32_t* scratch, int threads) {
  const int elements = box / ELEMENT;
  const auto kernel = elements == 4       ? microkernel<4, true>
                      : elements % 4 == 0 ? microkernel<4, false>
                      : elements % 2 == 0 ? microkernel<2, false>
                                          : microkernel<1, false>;
  multiply<true>(a, b, one_scale, box, bias, c, size, scratch, threads, kernel, offset);
}

}  // namespace

const IntegerGemm INTEGER_AVX2 = {"avx2", usable, fits, scratch_of<true>, gemm};
