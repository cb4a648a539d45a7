// The integer GEMM on NEON with sdot, which ARMv8.2 may have.
#define LANES 4
#ifdef __linux__
#include <sys/auxv.h>
#endif

#include "block_products.h"

namespace {

// Four columns' dot products with each of ROWS rows grow by an element.
template <int row = 0>
INLINE void add_dots(int32x4_t (&dots)[ROWS][2], int8x16_t rows, int8x16_t left, int8x16_t right) {
  dots[row][0] = vdotq_laneq_s32(dots[row][0], left, rows, row);
  dots[row][1] = vdotq_laneq_s32(dots[row][1], right, rows, row);
  if constexpr (row + 1 < ROWS) add_dots<row + 1>(dots, rows, left, right);
}

// With 8 integer and 8 float accumulators. A block has ELEMENTS elements, or, with 0, as many as the tile says.
template <int ELEMENTS> void microkernel(const BlockTile& tile) {
  const int8_t *a = tile.a, *b = tile.b;
  const float *a_scales = tile.a_scales, *b_scales = tile.b_scales;
  float row[PANEL] = {};
  if (tile.bias) memcpy(row, tile.bias, sizeof(float) * (size_t)tile.columns);
  float32x4_t sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) sums[r][0] = vld1q_f32(row), sums[r][1] = vld1q_f32(row + 4);
  for (int64_t index = 0; index < tile.blocks; index++, a_scales += PANEL, b_scales += PANEL) {
    int32x4_t dots[ROWS][2] = {};
    for (int e = 0; e < (ELEMENTS ? ELEMENTS : tile.elements); e++, a += ELEMENTS_SIZE, b += ELEMENTS_SIZE)
      add_dots(dots, vld1q_s8(a), vld1q_s8(b), vld1q_s8(b + 16));
    const float32x4_t left = vld1q_f32(b_scales), right = vld1q_f32(b_scales + 4);
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] = vfmaq_n_f32(sums[r][0], vmulq_f32(vcvtq_f32_s32(dots[r][0]), left), a_scales[r]);
      sums[r][1] = vfmaq_n_f32(sums[r][1], vmulq_f32(vcvtq_f32_s32(dots[r][1]), right), a_scales[r]);
    }
  }
  float* c = tile.c;
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++, c += tile.stride) {
    if (r == tile.rows) return;
    vst1q_f32(row, sums[r][0]);
    vst1q_f32(row + 4, sums[r][1]);
    memcpy(c, row, sizeof(float) * (size_t)tile.columns);
  }
}

bool usable() {
#ifdef __linux__
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Mac of this architecture
#endif
}

// NEON multiplies wider codes no faster than float32.
bool fits(int a_bits, int b_bits, int block_size) { return a_bits <= 8 && b_bits <= 8 && block_size % STEPS<int8_t> == 0; }

void gemm(const PackedOperand& a, const PackedOperand& b, bool one_scale, int block_size, const float* bias, const Result& c,
          GemmSize size, uint32_t* scratch, int threads) {
  const auto kernel = block_size / STEPS<int8_t> == 4 ? microkernel<4> : microkernel<0>;
  multiply<int8_t, false>(a, b, one_scale, block_size, bias, c, size, scratch, threads, kernel,
                          [](int, int, const int8_t*, float*) {});
}

int64_t scratch_size(GemmSize size, int, int, int block_size) { return panels_size<int8_t, false>(size, block_size); }

}  // namespace

const IntegerGemm INTEGER_NEON = {"neon", usable, fits, scratch_size, gemm};
