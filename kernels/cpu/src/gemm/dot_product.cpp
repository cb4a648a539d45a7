// C = A B from packed codes of at most 8 bits, boxes along the contraction: an exact integer dot product over each box,
// times the two boxes' scale factors, summed in float32 (NEON with sdot, which ARMv8.2 may have).
#define LANES 4
#ifdef __linux__
#include <sys/auxv.h>
#endif

#include "../codec/bits.h"
#include "../codec/rounding.h"
#include "../codec/signed_steps.h"
#include "../threads.h"
#include "packed.h"
#include "result_tile.h"

namespace {

constexpr int PANEL = 8;         // vectors of a panel
constexpr int ROWS = PANEL / 2;  // of a register tile, PANEL columns wide: 8 integer and 8 float accumulators
constexpr int TASK_ROWS = 64;    // of C in a task
constexpr int ELEMENT = 4;       // steps that a lane of the instruction multiplies
constexpr int ELEMENTS_SIZE = PANEL * ELEMENT;  // bytes of an element of every vector

int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// An operand's panels. A panel holds PANEL vectors: an element (four steps' codes, as bytes) of every vector, then the
// next; and the scale factors of a box of every vector, then of the next.
struct Panels {
  int64_t count, boxes, size;  // `size`: bytes of a panel's codes
  int8_t* codes;
  float* scales;

  Panels(int64_t vectors, int64_t depth, int box, void* memory)
      : count(ceil_div(vectors, PANEL)), boxes(ceil_div(depth, box)), size(boxes * box * PANEL),
        codes((int8_t*)memory), scales((float*)(codes + count * size)) {}
  void* end() const { return scales + count * boxes * PANEL; }
};

void pack_codes(const PackedVectors& x, int64_t vector, int64_t steps, int8_t* panel) {
  const Unpacker unpacker(x.bits);
  const int vectors = least(PANEL, x.vectors - vector);
  const int64_t row_bytes = x.row_bytes();
  memset(panel, 0, (size_t)(steps * PANEL));
  if (x.across) {
    const uint8_t* row = x.codes + vector / 8 * x.bits;
    for (int64_t k = 0; k < x.depth; k += ELEMENT, panel += ELEMENTS_SIZE) {
      int8x8x4_t codes = {};
      for (int step = 0; step < least(ELEMENT, x.depth - k); step++, row += row_bytes) {
        uint8_t few[16] = {};
        memcpy(few, row, (size_t)ceil_div(vectors * x.bits, 8));
        const int32x4_t low = (int32x4_t)unpacker.vector(few, 0), high = (int32x4_t)unpacker.vector(few, 1);
        codes.val[step] = vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)));
      }
      vst4_s8(panel, codes);
    }
    return;
  }
  const uint8_t* row = x.codes + vector * row_bytes;
  for (int i = 0; i < vectors; i++, row += row_bytes)
    for (int64_t k = 0; k < x.depth; k += TILE) {
      uint8_t few[TILE + 16] = {};
      const int count = least(TILE, x.depth - k);
      memcpy(few, row + k / 8 * x.bits, (size_t)ceil_div(count * x.bits, 8));
      I code[VECTORS];
      EACH_VECTOR(v) code[v] = unpacker.vector(few, v);
      for (int v = 0; v < VECTORS && v * ELEMENT < count; v++)
        write_bytes((uint8_t*)panel + (k / ELEMENT + v) * ELEMENTS_SIZE + i * ELEMENT, code[v]);
    }
}

// The scale factors of a panel; any number where there is no vector.
void fill_scales(const PackedVectors& x, int64_t vector, int64_t boxes, float* scales) {
  const SignedSteps steps(x.kind, x.bits, x.tensor_exponent());
  const int vectors = least(PANEL, x.vectors - vector);
  for (int64_t box = 0; box < boxes; box++)
    for (int first = 0; first < PANEL; first += LANES, scales += LANES) {
      uint8_t stored[LANES] = {};
      const uint8_t* from = x.exponents + box * x.to_next_box() + (vector + first) * x.to_next_vector();
      for (int i = 0; i < LANES && first + i < vectors; i++) stored[i] = from[i * x.to_next_vector()];
      const I scale = widened(stored);
      write(scales, x.kind == POWER ? AnyFactors(scale, x.bits).values_of(splat(1.0f)) : steps.of(scale));
    }
}

// Four columns' dot products with each of ROWS rows grow by an element.
template <int row = 0>
INLINE void add_dots(int32x4_t (&dots)[ROWS][2], int8x16_t rows, int8x16_t left, int8x16_t right) {
  dots[row][0] = vdotq_laneq_s32(dots[row][0], left, rows, row);
  dots[row][1] = vdotq_laneq_s32(dots[row][1], right, rows, row);
  if constexpr (row + 1 < ROWS) add_dots<row + 1>(dots, rows, left, right);
}

// A tile of C: ROWS rows, those of A's panel from `a` and `a_scales` on, by PANEL columns; `rows` by `columns` are
// written. A box has ELEMENTS elements, or, with 0, `elements`.
template <int ELEMENTS>
void microkernel(const int8_t* a, const float* a_scales, const int8_t* b, const float* b_scales, int64_t boxes,
                 int elements, const float* bias, float* c, int64_t stride, int rows, int columns) {
  float row[PANEL] = {};
  if (bias) memcpy(row, bias, sizeof(float) * (size_t)columns);
  float32x4_t sums[ROWS][2];
  for (int r = 0; r < ROWS; r++) sums[r][0] = vld1q_f32(row), sums[r][1] = vld1q_f32(row + 4);
  for (; boxes > 0; boxes--, a_scales += PANEL, b_scales += PANEL) {
    int32x4_t dots[ROWS][2] = {};
    for (int e = 0; e < (ELEMENTS ? ELEMENTS : elements); e++, a += ELEMENTS_SIZE, b += ELEMENTS_SIZE)
      add_dots(dots, vld1q_s8(a), vld1q_s8(b), vld1q_s8(b + 16));
    const float32x4_t left = vld1q_f32(b_scales), right = vld1q_f32(b_scales + 4);
    for (int r = 0; r < ROWS; r++) {
      sums[r][0] = vfmaq_n_f32(sums[r][0], vmulq_f32(vcvtq_f32_s32(dots[r][0]), left), a_scales[r]);
      sums[r][1] = vfmaq_n_f32(sums[r][1], vmulq_f32(vcvtq_f32_s32(dots[r][1]), right), a_scales[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++, c += stride) {
    if (r == rows) return;
    vst1q_f32(row, sums[r][0]);
    vst1q_f32(row + 4, sums[r][1]);
    memcpy(c, row, sizeof(float) * (size_t)columns);
  }
}

}  // namespace

bool gemm_integer_usable() {
#ifdef __linux__
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Mac of this architecture
#endif
}

int64_t gemm_integer_scratch(GemmSize size, int box) {
  const Panels a(size.rows, size.depth, box, nullptr), b(size.columns, size.depth, box, a.end());
  return (int64_t)b.end();
}

void gemm_integer(const PackedOperand& a, const PackedOperand& b, bool one_scale, int box, const float* bias,
                  const Result& c, GemmSize size, uint32_t* scratch, int threads) {
  const PackedVectors A = packed(a, box, one_scale, size.rows, size.depth);
  const PackedVectors B = packed(b, box, one_scale, size.columns, size.depth);
  const Panels left(size.rows, size.depth, box, scratch), right(size.columns, size.depth, box, left.end());
  if (size.rows * size.columns * size.depth < 1 << 20) threads = 1;

  parallel_for(left.count + right.count, threads, [&](int64_t i) {
    const bool of_a = i < left.count;
    const PackedVectors& x = of_a ? A : B;
    const Panels& panels = of_a ? left : right;
    const int64_t panel = of_a ? i : i - left.count;
    pack_codes(x, panel * PANEL, panels.boxes * box, panels.codes + panel * panels.size);
    fill_scales(x, panel * PANEL, panels.boxes, panels.scales + panel * panels.boxes * PANEL);
  });

  const int elements = box / ELEMENT;
  const auto kernel = elements == 4 ? microkernel<4> : microkernel<0>;
  const int64_t tiles = ceil_div(size.columns, TILE_COLUMNS);
  parallel_for(tiles * ceil_div(size.rows, TASK_ROWS), threads, [&](int64_t task) {
    const int64_t top = task / tiles * TASK_ROWS, first = task % tiles * TILE_COLUMNS;
    const int height = least(TASK_ROWS, size.rows - top), width = least(TILE_COLUMNS, size.columns - first);
    ResultTile<TASK_ROWS> tile(c, top, first, height, width, size.columns);
    for (int column = 0; column < width; column += PANEL)
      for (int row = 0; row < height; row += ROWS) {
        const int64_t i = (top + row) / PANEL, j = (first + column) / PANEL, half = (top + row) % PANEL;
        kernel(left.codes + i * left.size + half * ELEMENT, left.scales + i * left.boxes * PANEL + half,
               right.codes + j * right.size, right.scales + j * right.boxes * PANEL, left.boxes, elements,
               bias ? bias + first + column : nullptr, tile.row(row) + column, tile.stride(), least(ROWS, height - row),
               least(PANEL, width - column));
      }
    tile.finish();
  });
}
