// C = A^T B from packed block floating point, boxes along the contraction, as hardware for the format computes it: an
// exact integer dot product over each box, times the two boxes' steps, summed in float32 (AVX512_VNNI). One operand may
// be 16 bits wide, which no product of bfloat16 holds exactly.
#include "entries.h"
#include "panels.h"

namespace {

constexpr int ROWS = 6, COLUMNS = 32;  // of C in a register tile: 12 integer and 12 float accumulators
constexpr int TASK_PANELS = 32;        // panels of A that a task multiplies with one panel of B
constexpr int64_t A_PANEL = ROWS * DEPTH / 2, B_PANEL = COLUMNS * DEPTH / 2;

// A packed tensor (depth x lines): kernels/grid.py says how codes and exponents lie.
struct Packed {
  const uint8_t* codes;
  const uint8_t* exponents;  // (depth / box) x lines, or one for the tensor
  int32_t bits;
  int32_t one_exponent;
  int64_t lines;
  int64_t row_bytes() const { return ceil_div(lines * bits, 8); }
};

// `count` codes of a row, from code `first`; zeros after them.
__m512i codes_of(const uint8_t* row, int64_t first, int count, int bits) {
  const uint8_t* from = row + first * bits / 8;
  const int bytes = (int)ceil_div(count * bits, 8);
  const bool aligned = first * bits % 8 == 0;
  __m512i codes;
  if (bits == 16) {
    return _mm512_maskz_loadu_epi16(first32(count), from);
  } else if (bits == 8) {
    codes = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(bytes), from));
  } else if (bits == 4 && aligned) {
    // a byte in both halves of a lane, then each half's nibble to its top and back
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(twice, _mm512_set1_epi32(8 << 16 | 12)), 12);
  } else if (bits == 2 && aligned) {
    const __m512i lanes = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi64(lanes, 16));
    const __m512i four = _mm512_or_si512(twice, _mm512_slli_epi64(twice, 32));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(four, _mm512_set1_epi64(8LL << 48 | 10LL << 32 | 12 << 16 | 14)), 14);
  } else {
    alignas(64) int16_t out[32] = {};
    for (int i = 0; i < count; i++) {
      const int64_t bit = (first + i) * bits;
      const int last = (int)((bit % 8 + bits - 1) / 8);
      uint32_t window = 0;
      for (int j = 0; j <= last; j++) window |= (uint32_t)row[bit / 8 + j] << (8 * j);
      out[i] = (int16_t)((int32_t)(window >> bit % 8 << (32 - bits)) >> (32 - bits));
    }
    return _mm512_load_si512(out);
  }
  return _mm512_maskz_mov_epi16(first32(count), codes);
}

template <int width>
void pack(const Packed& x, int64_t line, int64_t k, int depth, int box, const float* steps, uint32_t* panel, float* scales) {
  const int lines = least(width, x.lines - line);
  const uint8_t* row = x.codes + k * x.row_bytes();
  panel_of_rows<width>([&](int i) { return codes_of(row + i * x.row_bytes(), line, lines, x.bits); }, depth, panel);
  const int used = (depth + box - 1) / box * box / 2;
  for (int i = (depth + 1) / 2 * width; i < used * width; i++) panel[i] = 0;
  for (int b = 0; b * box < depth; b++)
    for (int i = 0; i < width; i++) {
      const uint8_t* stored = x.one_exponent ? x.exponents : x.exponents + (k / box + b) * x.lines + line + i;
      scales[b * width + i] = i < lines ? steps[*stored] : 0;
    }
}

template <int rows>
void tile(const uint32_t* a, const float* a_scales, const uint32_t* b, const float* b_scales, int boxes, int pairs, float* c,
          int64_t stride, int columns, bool add) {
  __m512 left[rows], right[rows];
  for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
  for (; boxes > 0; boxes--, a_scales += ROWS, b_scales += COLUMNS) {
    __m512i dot_left[rows], dot_right[rows];
    for (int r = 0; r < rows; r++) dot_left[r] = dot_right[r] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int p = 0; p < pairs; p++, a += ROWS, b += COLUMNS) {
      const __m512i b_left = _mm512_loadu_si512(b), b_right = _mm512_loadu_si512(b + 16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        const __m512i a_row = _mm512_set1_epi32((int)a[r]);
        dot_left[r] = _mm512_dpwssd_epi32(dot_left[r], a_row, b_left);
        dot_right[r] = _mm512_dpwssd_epi32(dot_right[r], a_row, b_right);
      }
    }
    const __m512 scale_left = _mm512_loadu_ps(b_scales), scale_right = _mm512_loadu_ps(b_scales + 16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 scale = _mm512_set1_ps(a_scales[r]);
      left[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot_left[r]), scale_left), scale, left[r]);
      right[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot_right[r]), scale_right), scale, right[r]);
    }
  }
  const __mmask16 left_mask = first16(columns), right_mask = first16(columns - 16);
  for (int r = 0; r < rows; r++, c += stride) {
    if (add) {
      left[r] = _mm512_add_ps(left[r], _mm512_maskz_loadu_ps(left_mask, c));
      right[r] = _mm512_add_ps(right[r], _mm512_maskz_loadu_ps(right_mask, c + 16));
    }
    _mm512_mask_storeu_ps(c, left_mask, left[r]);
    _mm512_mask_storeu_ps(c + 16, right_mask, right[r]);
  }
}

typedef void (*Tile)(const uint32_t*, const float*, const uint32_t*, const float*, int, int, float*, int64_t, int, bool);
const Tile TILES[ROWS + 1] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

// 2^(E - (bits - 2)) for each stored exponent; NaN where the box holds one
void fill_steps(int bits, float steps[256]) {
  for (int stored = 0; stored < 255; stored++) steps[stored] = __builtin_ldexpf(1, stored - 127 - (bits - 2));
  steps[255] = __builtin_nanf("");
}

}  // namespace

EXPORT int dsq_has_gemm_boxes() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// Bytes of scratch memory that a product (depth x rows)^T (depth x columns) with boxes of `box` needs.
EXPORT int64_t dsq_gemm_boxes_scratch(int64_t rows, int64_t columns, int64_t depth, int box) {
  const int64_t blocks = ceil_div(depth, DEPTH), boxes = DEPTH / box;
  const int64_t a_panels = ceil_div(rows, ROWS), b_panels = ceil_div(columns, COLUMNS);
  return 4 * blocks * (a_panels * (A_PANEL + boxes * ROWS) + b_panels * (B_PANEL + boxes * COLUMNS));
}

// c (rows x columns, contiguous) = a^T b; a (depth x rows) and b (depth x columns) packed with boxes of `box` along the
// depth, or with one exponent. `box` is even and divides 256; a dot product over it must fit 32 bits.
EXPORT void dsq_gemm_boxes(const uint8_t* a_codes, const uint8_t* a_exponents, int a_bits, const uint8_t* b_codes,
                           const uint8_t* b_exponents, int b_bits, int one_exponent, int box, float* c, int64_t rows,
                           int64_t columns, int64_t depth, uint32_t* scratch, int threads) {
  const Packed A{a_codes, a_exponents, a_bits, one_exponent, rows}, B{b_codes, b_exponents, b_bits, one_exponent, columns};
  const int64_t a_panels = ceil_div(rows, ROWS), b_panels = ceil_div(columns, COLUMNS), blocks = ceil_div(depth, DEPTH);
  const int64_t boxes = DEPTH / box;
  uint32_t* b_scratch = scratch + a_panels * blocks * A_PANEL;
  float* a_scales = (float*)(b_scratch + b_panels * blocks * B_PANEL);
  float* b_scales = a_scales + a_panels * blocks * boxes * ROWS;
  float a_steps[256], b_steps[256];
  fill_steps(a_bits, a_steps);
  fill_steps(b_bits, b_steps);
  if (rows * columns * depth < 1 << 20) threads = 1;

  share_out((a_panels + b_panels) * blocks, threads, [&](int64_t i) {
    const int64_t panel = i / blocks, k = i % blocks;
    const int steps = least(DEPTH, depth - k * DEPTH);
    if (panel < a_panels)
      return pack<ROWS>(A, panel * ROWS, k * DEPTH, steps, box, a_steps, scratch + i * A_PANEL, a_scales + i * boxes * ROWS);
    const int64_t j = i - a_panels * blocks;
    pack<COLUMNS>(B, (panel - a_panels) * COLUMNS, k * DEPTH, steps, box, b_steps, b_scratch + j * B_PANEL,
                  b_scales + j * boxes * COLUMNS);
  });

  const int64_t chunks = ceil_div(a_panels, TASK_PANELS);
  share_out(b_panels * chunks, threads, [&](int64_t task) {
    const int64_t j = task / chunks, first = task % chunks * TASK_PANELS;
    const int width = least(COLUMNS, columns - j * COLUMNS);
    for (int64_t k = 0; k < blocks; k++) {
      const int here = (int)ceil_div(least(DEPTH, depth - k * DEPTH), box);
      const int64_t b = j * blocks + k;
      for (int64_t i = first; i < a_panels && i < first + TASK_PANELS; i++) {
        const int64_t a = i * blocks + k;
        TILES[least(ROWS, rows - i * ROWS)](scratch + a * A_PANEL, a_scales + a * boxes * ROWS, b_scratch + b * B_PANEL,
                                            b_scales + b * boxes * COLUMNS, here, box / 2,
                                            c + i * ROWS * columns + j * COLUMNS, columns, width, k > 0);
      }
    }
  });
}
