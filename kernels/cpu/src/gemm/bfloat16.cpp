// C = A B, operands in bfloat16, products exact, sums in float32 (AVX512_BF16, which takes subnormal values as zero).
#define LANES 16
#include "../threads.h"
#include "bfloat16_packing.h"
#include "result_tile.h"

namespace {

constexpr int ROWS = 14, COLUMNS = TILE_COLUMNS;  // of C in a register tile: 28 accumulators, 2 registers of B, 1 of A
constexpr int DEPTH = 256;              // steps of a panel: B's takes 16 KiB and stays in the first-level cache
constexpr int TASK_PANELS = 16;         // panels of A that a task multiplies by one panel of B
constexpr int64_t A_PANEL = ROWS * DEPTH / 2, B_PANEL = COLUMNS * DEPTH / 2;

// A tile of C, `rows` high and `columns` wide, from a panel of A and one of B; `start`, where there is one, is added: C
// itself, or a bias row (start_stride 0).
template <int rows>
void microkernel(const uint32_t* a, const uint32_t* b, int pairs, float* c, int64_t stride, int columns,
                 const float* start, int64_t start_stride) {
  __m512 left[rows], right[rows];
  for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
  for (int p = 0; p < pairs; p++, a += ROWS, b += COLUMNS) {
    const __m512bh b_left = (__m512bh)_mm512_loadu_si512(b), b_right = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) {
      const __m512bh a_row = (__m512bh)_mm512_set1_epi32((int)a[r]);
      left[r] = _mm512_dpbf16_ps(left[r], a_row, b_left);
      right[r] = _mm512_dpbf16_ps(right[r], a_row, b_right);
    }
  }
  const __mmask16 left_mask = first16(columns), right_mask = first16(columns - 16);
#pragma GCC unroll 14
  for (int r = 0; r < rows; r++, c += stride) {
    if (start) {
      left[r] = _mm512_add_ps(left[r], _mm512_maskz_loadu_ps(left_mask, start + r * start_stride));
      right[r] = _mm512_add_ps(right[r], _mm512_maskz_loadu_ps(right_mask, start + r * start_stride + 16));
    }
    _mm512_mask_storeu_ps(c, left_mask, left[r]);
    _mm512_mask_storeu_ps(c + 16, right_mask, right[r]);
  }
}

typedef void (*Microkernel)(const uint32_t*, const uint32_t*, int, float*, int64_t, int, const float*, int64_t);
const Microkernel MICROKERNELS[ROWS + 1] = {
    nullptr,         microkernel<1>,  microkernel<2>,  microkernel<3>,  microkernel<4>,
    microkernel<5>,  microkernel<6>,  microkernel<7>,  microkernel<8>,  microkernel<9>,
    microkernel<10>, microkernel<11>, microkernel<12>, microkernel<13>, microkernel<14>};

bool usable() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
}

int64_t scratch_bytes(GemmSize size) {
  const int64_t blocks = ceil_div(size.depth, DEPTH);
  return 4 * blocks * (ceil_div(size.rows, ROWS) * A_PANEL + ceil_div(size.columns, COLUMNS) * B_PANEL);
}

void multiply(const Bfloat16Operand& a, const Bfloat16Operand& b, const float* bias, const Result& c, GemmSize size,
              uint32_t* scratch, int threads) {
  const int64_t rows = size.rows, columns = size.columns, depth = size.depth;
  const int64_t a_panels = ceil_div(rows, ROWS), b_panels = ceil_div(columns, COLUMNS), blocks = ceil_div(depth, DEPTH);
  uint32_t* b_scratch = scratch + a_panels * blocks * A_PANEL;
  if (rows * columns * depth < 1 << 20) threads = 1;

  parallel_for((a_panels + b_panels) * blocks, threads, [&](int64_t i) {
    const int64_t panel = i / blocks, k = i % blocks;
    const int steps = least(DEPTH, depth - k * DEPTH);
    if (panel < a_panels) return pack<ROWS>(a, rows, panel * ROWS, k * DEPTH, steps, scratch + i * A_PANEL);
    const int64_t j = panel - a_panels;
    pack<COLUMNS>(b, columns, j * COLUMNS, k * DEPTH, steps, b_scratch + (j * blocks + k) * B_PANEL);
  });

  const int64_t chunks = ceil_div(a_panels, TASK_PANELS);
  parallel_for(b_panels * chunks, threads, [&](int64_t task) {
    const int64_t j = task / chunks, first = task % chunks * TASK_PANELS;
    const int width = least(COLUMNS, columns - j * COLUMNS);
    const int64_t top = first * ROWS;
    ResultTile<TASK_PANELS * ROWS> tile(c, top, j * COLUMNS, least(TASK_PANELS * ROWS, rows - top), width, columns);
    for (int64_t k = 0; k < blocks; k++) {
      const int pairs = (least(DEPTH, depth - k * DEPTH) + 1) / 2;
      for (int64_t i = first; i < a_panels && i < first + TASK_PANELS; i++) {
        float* corner = tile.row(i * ROWS - top);
        const float* start = k ? corner : bias ? bias + j * COLUMNS : nullptr;
        const uint32_t *a_panel = scratch + (i * blocks + k) * A_PANEL, *panel = b_scratch + (j * blocks + k) * B_PANEL;
        MICROKERNELS[least(ROWS, rows - i * ROWS)](a_panel, panel, pairs, corner, tile.stride(), width, start,
                                                   k ? tile.stride() : 0);
      }
    }
    tile.finish();
  });
}

}  // namespace

const Bfloat16Gemm BFLOAT16_AVX512 = {usable, scratch_bytes, multiply};
