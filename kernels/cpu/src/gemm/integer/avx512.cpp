// C = A B from packed codes, blocks along the contraction, as hardware for the format computes it: an exact integer dot
// product over each block, times the two blocks' scale factors, summed in float32 (AVX512_VNNI).
//
// Codes of at most 8 bits multiply as int8, wider ones as int16. Where narrow codes let the blocks of a run share an
// exponent (shared_exponents.h), one int8 dot product takes the run.
#define LANES 16
#include "../../threads.h"
#include "../result_tile.h"
#include "shared_exponents.h"

namespace {

constexpr int ROWS = 6;               // of a register tile, PANEL columns wide: 12 integer and 12 float accumulators
constexpr int TASK_ROWS = 3 * PANEL;  // of C in a task: their vectors of A stay in the second-level cache
constexpr int UNROLLED = 8;           // elements of a long run in a pass of the innermost loop
static_assert(RUN % (4 * UNROLLED) == 0, "a run is unrolled without rest");
static_assert(TASK_ROWS % ROWS == 0 && TASK_ROWS % PANEL == 0, "a task takes whole tiles and whole panels");

// sum += a . b. In assembly because GCC 12 copies the accumulator before and after the intrinsics, which takes as long
// again as the products.
template <bool int8> inline void add_dot(__m512i& sum, __m512i a, __m512i b) {
#ifdef DSQ_EMULATED  // .ci/avx512
  sum = int8 ? _mm512_dpbusd_epi32(sum, a, b) : _mm512_dpwssd_epi32(sum, a, b);
#else
  if constexpr (int8) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  else asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
}

// One vector after another.
struct PanelOfA {
  const uint32_t* elements;  // VECTOR_ELEMENTS a vector
  const float* scales;       // one block's, of TASK_ROWS vectors; then the next block's
};

struct PanelOfB {
  const uint32_t* elements;
  const float* scales;
  const int32_t* offsets;
};

// The steps that one integer dot product takes: of so many elements, and so many blocks, which share their exponents.
struct RunShape {
  int elements, blocks;
};

// Where scales are powers of two, x of B and y of A, exponents are added: all dot products wait for the two units that
// multiply. The bits of x less those of 1, and with those of y added, x y.
inline __m512i over_one(__m512 x) { return _mm512_sub_epi32((__m512i)x, _mm512_set1_epi32(127 << 23)); }
inline __m512 product(__m512i x_over_one, __m512 y) { return (__m512)_mm512_add_epi32(x_over_one, (__m512i)y); }
// With panels of int16 the other units have time for the sums too: of a whole number times x y / 2^MAX_PRODUCT, which
// takes from its exponent. The subtraction saturates, and leaves a zero as it is.
constexpr int MAX_PRODUCT = 2 * MAX_MODERATE<false>;
inline __m512i below_most(__m512 x) {
  return _mm512_sub_epi32(_mm512_set1_epi32((int)((254u + MAX_PRODUCT) << 23)), (__m512i)x);
}
inline __m512 lowered(__m512 whole, __m512i x_below_most, __m512 y) {
  return (__m512)_mm512_subs_epu16((__m512i)whole, _mm512_sub_epi32(x_below_most, (__m512i)y));
}

// A tile of C over `runs` runs, `columns` wide; `start`, where there is one, is added: C itself, or a bias row
// (start_stride 0). A run is one block of ELEMENTS elements, or, with 0, of any multiple of UNROLLED. POWERS: scales are
// powers of two of moderate size.
template <int rows, bool int8, int ELEMENTS, bool POWERS>
INLINE void microkernel(PanelOfA a, PanelOfB b, int runs, RunShape run, float* c, int64_t stride, int columns,
                        const float* start, int64_t start_stride) {
  constexpr int together = ELEMENTS ? ELEMENTS : UNROLLED;
  const int elements = ELEMENTS ? ELEMENTS : run.elements, blocks = ELEMENTS ? 1 : run.blocks;
  __m512 left[rows], right[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
  for (; runs > 0; runs--, a.scales += blocks * TASK_ROWS, b.scales += blocks * PANEL) {
    __m512i dot_left[rows], dot_right[rows], offset_left = _mm512_setzero_si512(), offset_right = offset_left;
    if (int8) {
      offset_left = _mm512_loadu_si512(b.offsets), offset_right = _mm512_loadu_si512(b.offsets + 16);
      b.offsets += blocks * PANEL;
      offset_left = _mm512_sub_epi32(offset_left, _mm512_loadu_si512(b.offsets));
      offset_right = _mm512_sub_epi32(offset_right, _mm512_loadu_si512(b.offsets + 16));
    }
    for (int r = 0; r < rows; r++) dot_left[r] = offset_left, dot_right[r] = offset_right;
    for (int e = 0; e < elements; e += together)
#pragma GCC unroll 8
      for (int u = 0; u < together; u++, a.elements++, b.elements += PANEL) {
        const __m512i b_left = _mm512_loadu_si512(b.elements), b_right = _mm512_loadu_si512(b.elements + 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          const __m512i a_row = _mm512_set1_epi32((int)a.elements[r * VECTOR_ELEMENTS]);
          add_dot<int8>(dot_left[r], a_row, b_left);
          add_dot<int8>(dot_right[r], a_row, b_right);
        }
      }
    const __m512 scale_left = _mm512_loadu_ps(b.scales), scale_right = _mm512_loadu_ps(b.scales + 16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 scale = _mm512_set1_ps(a.scales[r]);
      const __m512 sum_left = _mm512_cvtepi32_ps(dot_left[r]), sum_right = _mm512_cvtepi32_ps(dot_right[r]);
      if (POWERS && int8) {
        left[r] = _mm512_fmadd_ps(sum_left, product(over_one(scale_left), scale), left[r]);
        right[r] = _mm512_fmadd_ps(sum_right, product(over_one(scale_right), scale), right[r]);
      } else if (POWERS) {
        left[r] = _mm512_add_ps(left[r], lowered(sum_left, below_most(scale_left), scale));
        right[r] = _mm512_add_ps(right[r], lowered(sum_right, below_most(scale_right), scale));
      } else {
        left[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum_left, scale_left), scale, left[r]);
        right[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum_right, scale_right), scale, right[r]);
      }
    }
  }
  const __m512 most = _mm512_set1_ps(1 << MAX_PRODUCT);
  const __mmask16 left_mask = first16(columns), right_mask = first16(columns - 16);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++, c += stride) {
    if (POWERS && !int8) left[r] = _mm512_mul_ps(left[r], most), right[r] = _mm512_mul_ps(right[r], most);
    if (start) {
      left[r] = _mm512_add_ps(left[r], _mm512_maskz_loadu_ps(left_mask, start + r * start_stride));
      right[r] = _mm512_add_ps(right[r], _mm512_maskz_loadu_ps(right_mask, start + r * start_stride + 16));
    }
    _mm512_mask_storeu_ps(c, left_mask, left[r]);
    _mm512_mask_storeu_ps(c + 16, right_mask, right[r]);
  }
}

// The operands of a task in a slab: `runs` runs of `height` vectors of A, and a panel of B.
struct SlabOfTask {
  PanelOfA a;
  PanelOfB b;
  int runs;
  RunShape run;
  int height, width;
  const float* bias;  // where sums begin, or null
  bool first;         // of the slabs; later ones begin with the sums so far
};

// Multiplies the tiles from `row` on, `rows` high, and the shorter tile below them.
template <bool int8, int ELEMENTS, bool POWERS, int rows = ROWS>
void microkernels(SlabOfTask slab, ResultTile<TASK_ROWS>& tile, int row = 0) {
  const int64_t stride = tile.stride();
  for (; row + rows <= slab.height; row += rows) {
    tile.prefetch(row, rows);
    float* const c = tile.row(row);
    microkernel<rows, int8, ELEMENTS, POWERS>(slab.a, slab.b, slab.runs, slab.run, c, stride, slab.width,
                                              slab.first ? slab.bias : c, slab.first ? 0 : stride);
    slab.a.elements += rows * VECTOR_ELEMENTS, slab.a.scales += rows;
  }
  if constexpr (rows > 1)
    if (row < slab.height) microkernels<int8, ELEMENTS, POWERS, rows - 1>(slab, tile, row);
}

template <bool int8, bool POWERS> void multiply_block(const SlabOfTask& slab, ResultTile<TASK_ROWS>& tile) {
  switch (slab.run.blocks > 1 ? 0 : slab.run.elements) {
    case 1: return microkernels<int8, 1, POWERS>(slab, tile);
    case 2: return microkernels<int8, 2, POWERS>(slab, tile);
    case 4: return microkernels<int8, 4, POWERS>(slab, tile);  // a block of 16 as int8
    case 8: return microkernels<int8, 8, POWERS>(slab, tile);  // and as int16
    default: return microkernels<int8, 0, POWERS>(slab, tile);
  }
}

// Of a panel in a slab: the steps of its runs, and whether its scales are powers of two of moderate size.
struct PanelRuns {
  int16_t steps, powers;
};

// The parts of the GEMM's scratch memory, in slabs of `steps` steps.
struct Scratch {
  int64_t a_panels, a_tasks, b_panels, slabs, blocks;
  Scratch(GemmSize size, int block_size, int steps)
      : a_panels(ceil_div(size.rows, PANEL)), a_tasks(ceil_div(size.rows, TASK_ROWS)),
        b_panels(ceil_div(size.columns, PANEL)), slabs(ceil_div(size.depth, steps)), blocks(steps / block_size) {}
  int64_t panels() const { return a_panels + b_panels; }
  int64_t elements() const { return slabs * panels() * PANEL * VECTOR_ELEMENTS; }
  int64_t a_scales() const { return slabs * a_tasks * blocks * TASK_ROWS; }
  int64_t b_scales() const { return slabs * b_panels * blocks * PANEL; }
  int64_t b_offsets() const { return slabs * b_panels * (blocks + 1) * PANEL; }
  int64_t bytes() const { return 4 * (elements() + a_scales() + b_scales() + b_offsets() + slabs * panels()); }
};

// Both operands' panels in scratch memory, a slab of the depth after another.
template <bool int8> class Panels {
 public:
  const IntegerOperand &A, &B;
  const Scratch size;

  Panels(const IntegerOperand& a, const IntegerOperand& b, uint32_t* memory)
      : A(a), B(b), size({a.vectors, b.vectors, a.depth}, a.block_size, SLAB_STEPS), a_elements_(memory),
        b_elements_(memory + size.slabs * size.a_panels * PANEL * VECTOR_ELEMENTS),
        a_scales_((float*)(memory + size.elements())), b_scales_(a_scales_ + size.a_scales()),
        b_offsets_((int32_t*)(b_scales_ + size.b_scales())), runs_((PanelRuns*)(b_offsets_ + size.b_offsets())) {}

  // A's panels come first.
  void pack(int64_t panel, int64_t slab) const {
    if (panel < size.a_panels) pack_panel_of_a(panel, slab);
    else pack_panel_of_b(panel - size.a_panels, slab);
  }

  // The product of `height` vectors of A from `top` on and panel j of B.
  SlabOfTask block_of_task(int64_t top, int height, int64_t j, int width, int64_t slab, PanelRuns run,
                            const float* bias) const {
    const int steps = steps_of(slab), run_steps = least(run.steps, A.steps_read(steps));
    const int64_t at = b_panel_at(slab, j);
    return {{a_elements_of(slab, top), a_scales_of(slab, top)},
            {b_elements_ + at * VECTOR_ELEMENTS, b_scales_ + at * size.blocks, b_offsets_ + at * (size.blocks + 1)},
            (int)ceil_div(steps, run.steps), {run_steps / PER_ELEMENT<int8>, run_steps / A.block_size}, height, width,
            bias ? bias + j * PANEL : nullptr, slab == 0};
  }

  // The runs that all of these panels have.
  PanelRuns common_runs(int64_t top, int height, int64_t j, int64_t slab) const {
    PanelRuns run = runs_of(size.a_panels + j, slab);
    for (int64_t panel = top / PANEL; panel * PANEL < top + height; panel++) {
      const PanelRuns& other = runs_of(panel, slab);
      run = {(int16_t)least(run.steps, other.steps), (int16_t)(run.powers & other.powers)};
    }
    return run;
  }

 private:
  static constexpr int SLAB_STEPS = STEPS<int8>;

  int steps_of(int64_t slab) const { return least(SLAB_STEPS, A.depth - slab * SLAB_STEPS); }
  int block_elements() const { return A.block_size / PER_ELEMENT<int8>; }
  uint32_t* a_elements_of(int64_t slab, int64_t vector) const {
    return a_elements_ + (slab * size.a_panels * PANEL + vector) * VECTOR_ELEMENTS;
  }
  float* a_scales_of(int64_t slab, int64_t vector) const {
    const int64_t task = slab * size.a_tasks + vector / TASK_ROWS;
    return a_scales_ + task * size.blocks * TASK_ROWS + vector % TASK_ROWS;
  }
  int64_t b_panel_at(int64_t slab, int64_t panel) const { return (panel * size.slabs + slab) * PANEL; }
  PanelRuns& runs_of(int64_t panel, int64_t slab) const { return runs_[slab * size.panels() + panel]; }

  // Brings blocks to the exponents that they can share.
  template <class Zeros> static PanelRuns share_exponents(const IntegerOperand& x, Exponents& exponents, Zeros zeros) {
    if (!x.has_powers()) return {(int16_t)x.block_size, 0};
    exponents.pass_over_zeros(zeros);
    const int steps = int8 ? exponents.share(8 - x.integer_bits()) : x.block_size;
    return {(int16_t)steps, exponents.template moderate<int8>()};
  }

  void pack_panel_of_a(int64_t panel, int64_t slab) const {
    const int64_t vector = panel * PANEL, k = slab * SLAB_STEPS;
    const int steps = steps_of(slab);
    uint32_t* elements = a_elements_of(slab, vector);
    Exponents exponents(A, vector, k, steps);
    pack_a<int8>(A, vector, k, steps, elements);
    auto zeros = [&](int b) { return zeros_of_a(elements, b, block_elements()); };
    runs_of(panel, slab) = share_exponents(A, exponents, zeros);
    if constexpr (int8) finish_a(exponents, elements);
    exponents.fill_scales(a_scales_of(slab, vector), TASK_ROWS);
  }

  void pack_panel_of_b(int64_t panel, int64_t slab) const {
    const int64_t vector = panel * PANEL, k = slab * SLAB_STEPS, at = b_panel_at(slab, panel);
    const int steps = steps_of(slab);
    uint32_t* elements = b_elements_ + at * VECTOR_ELEMENTS;
    Exponents exponents(B, vector, k, steps);
    pack_b<int8>(B, vector, k, steps, elements);
    auto zeros = [&](int b) { return zeros_of_b(elements, b, block_elements()); };
    runs_of(size.a_panels + panel, slab) = share_exponents(B, exponents, zeros);
    if (exponents.multiplied) multiply_b<int8>(exponents, elements);
    exponents.fill_scales(b_scales_ + at * size.blocks, PANEL);
    if (int8)
      fill_offsets(elements, B.steps_read(steps) / B.block_size, block_elements(), b_offsets_ + at * (size.blocks + 1));
  }

  uint32_t *const a_elements_, *const b_elements_;
  float *const a_scales_, *const b_scales_;
  int32_t* const b_offsets_;
  PanelRuns* const runs_;
};

template <bool int8>
void multiply(const IntegerOperand& A, const IntegerOperand& B, const float* bias, const Result& c, uint32_t* memory,
              int threads) {
  const Panels<int8> panels(A, B, memory);
  const Scratch& size = panels.size;
  if (A.vectors * B.vectors * A.depth < 1 << 20) threads = 1;

  // Neighboring panels come one after another: across, their codes lie side by side.
  parallel_for(size.slabs * size.panels(), threads,
               [&](int64_t task) { panels.pack(task % size.panels(), task / size.panels()); });

  parallel_for(size.b_panels * size.a_tasks, threads, [&](int64_t task) {
    const int64_t j = task % size.b_panels, top = task / size.b_panels * TASK_ROWS;
    const int height = least(TASK_ROWS, A.vectors - top), width = least(PANEL, B.vectors - j * PANEL);
    ResultTile<TASK_ROWS> tile(c, top, j * PANEL, height, width, B.vectors);
    for (int64_t slab = 0; slab < size.slabs; slab++) {
      const PanelRuns run = panels.common_runs(top, height, j, slab);
      const SlabOfTask part = panels.block_of_task(top, height, j, width, slab, run, bias);
      run.powers ? multiply_block<int8, true>(part, tile) : multiply_block<int8, false>(part, tile);
    }
    tile.finish();
  });
}

bool usable() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

bool fits(int, int, int block_size) { return block_size % 2 == 0; }

bool as_int8(int a_bits, int b_bits, int block_size) { return a_bits <= 8 && b_bits <= 8 && block_size % 4 == 0; }

int64_t scratch_of(GemmSize size, int a_bits, int b_bits, int block_size) {
  return Scratch(size, block_size, as_int8(a_bits, b_bits, block_size) ? STEPS<true> : STEPS<false>).bytes();
}

void gemm(const PackedOperand& a, const PackedOperand& b, bool one_scale, int block_size, const float* bias, const Result& c,
          GemmSize size, uint32_t* scratch, int threads) {
  IntegerOperand A{packed(a, block_size, one_scale, size.rows, size.depth)};
  IntegerOperand B{packed(b, block_size, one_scale, size.columns, size.depth)};
  const bool int8 = as_int8(a.bits, b.bits, block_size);
  // In panels of int16 A's codes leave no room.
  auto fold = [&](IntegerOperand& x, const IntegerOperand& other) {
    const int sum_bits = x.folded_bits() + other.integer_bits() - 2 + __builtin_ctz((unsigned)block_size);
    x.folded = x.kind != POWER && x.folded_bits() <= (int8 ? 8 : 16) && sum_bits < 31;
  };
  if (int8) fold(A, B);
  fold(B, A);
  (int8 ? multiply<true> : multiply<false>)(A, B, bias, c, scratch, threads);
}

}  // namespace

const IntegerGemm INTEGER_AVX512 = {"avx512_vnni", usable, fits, scratch_of, gemm};
