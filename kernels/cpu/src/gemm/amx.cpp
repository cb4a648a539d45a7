// C = A B by AMX's tiles, operands in bfloat16, products exact, sums in float32; subnormal values count as zero. A and
// B have two tiles each, C has four. Rows of A that lie in memory as the tiles read them are not packed.
#define LANES 16
#include "../threads.h"
#include "bfloat16_packing.h"
#include "result_tile.h"
#include "tiles.h"

#ifndef DSQ_EMULATED_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE = 16;             // rows of a tile, each of 64 bytes
constexpr int STEPS = 32;            // of the contraction in a tile
constexpr int PANEL = TILE_COLUMNS;  // vectors of A, and of B, that four accumulators multiply
constexpr int DEPTH = 256;           // steps of a panel: A's and B's take 32 of the 48 KiB of the first-level cache
constexpr int TASK_ROWS = 256;       // of C in a task, at most
constexpr int64_t TASK_BYTES = 1 << 20;  // of A in a task, about: half of the second-level cache
constexpr int64_t PANEL_ELEMENTS = PANEL * DEPTH / 2;
constexpr int64_t ALIASED = 4096;  // bytes between rows that share their sets of the first-level cache
static_assert(PANEL == 2 * TILE && TASK_ROWS % PANEL == 0 && DEPTH % STEPS == 0, "tasks and panels take whole tiles");

const TileConfig CONFIG = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// A panel of A in memory: tiles of 16 rows, side by side along the contraction.
struct PanelOfA {
  const uint8_t* data;
  int64_t row_bytes, tile_bytes;  // from a row to the next, and from a tile to the next
};

// Whether the tiles read this panel where it lies.
bool lies_in_tiles(const Bfloat16Operand& a, int64_t rows, int64_t first, int depth) {
  return a.depth_stride == 1 && first + PANEL <= rows && depth % STEPS == 0 && 2 * a.vector_stride % ALIASED != 0;
}

// Packs vectors from vector `first` on, over `depth` steps from k on, as B's tiles lie: zeros up to the last one's end.
void pack_tiles_of_b(const Bfloat16Operand& x, int64_t vectors, int64_t first, int64_t k, int depth, uint32_t* panel) {
  pack<PANEL>(x, vectors, first, k, depth, panel);
  const int64_t pairs = (depth + 1) / 2, pairs_of_tiles = ceil_div(depth, STEPS) * STEPS / 2;
  memset(panel + pairs * PANEL, 0, (size_t)(4 * (pairs_of_tiles - pairs) * PANEL));
}

// The same as A's tiles lie: two of them, one below the other, for each 32 steps.
void pack_tiles_of_a(const Bfloat16Operand& x, int64_t vectors, int64_t first, int64_t k, int depth, uint32_t* panel) {
  const bool by_rows = x.depth_stride == 1;
  const int row_count = least(PANEL, vectors - first);
  const uint16_t* rows = x.data + first * x.vector_stride + k;
  alignas(64) uint32_t pairs[TILE * PANEL];
  for (int step = 0; step < depth; step += STEPS) {
    const int step_count = least(STEPS, depth - step);
    if (!by_rows) pack_tiles_of_b(x, vectors, first, k + step, step_count, pairs);
    for (int top = 0; top < PANEL; top += TILE, panel += TILE * TILE) {
      __m512i r[TILE];
      for (int i = 0; i < TILE; i++) {
        if (!by_rows) r[i] = _mm512_load_si512(pairs + i * PANEL + top);
        else if (top + i >= row_count) r[i] = _mm512_setzero_si512();
        else r[i] = _mm512_maskz_loadu_epi16(first32(step_count), rows + (top + i) * x.vector_stride + step);
      }
      if (!by_rows) transpose16(r);
      for (int i = 0; i < TILE; i++) _mm512_storeu_si512(panel + i * TILE, r[i]);
    }
  }
}

// A tile of C, 32 rows and columns, from a panel of A and one of B, `tiles` along the contraction. The sums start at
// `start`: C itself, or a row (start_stride 0).
void microkernel(PanelOfA a, const uint32_t* b, int tiles, float* c, int64_t stride, const float* start,
                 int64_t start_stride) {
  asm volatile("" : : : "memory");  // GCC's intrinsics do not say that tiles are loaded from memory
  const int64_t start_bytes = 4 * start_stride, c_bytes = 4 * stride, b_bytes = 4 * PANEL;
  _tile_loadd(0, start, start_bytes);
  _tile_loadd(1, start + TILE, start_bytes);
  _tile_loadd(2, start + TILE * start_stride, start_bytes);
  _tile_loadd(3, start + TILE * start_stride + TILE, start_bytes);
  for (; tiles > 0; tiles--, a.data += a.tile_bytes, b += TILE * PANEL) {
    _tile_loadd(4, a.data, a.row_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + TILE, b_bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a.data + TILE * a.row_bytes, a.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + TILE, c_bytes);
  _tile_stored(2, c + TILE * stride, c_bytes);
  _tile_stored(3, c + TILE * stride + TILE, c_bytes);
}

bool usable() {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return false;
#ifndef DSQ_EMULATED_TILES
  constexpr unsigned osxsave = 1u << 27, amx_bf16 = 1u << 22, amx_tile = 1u << 24, tile_state = 3u << 17;
  unsigned a, b, c, d, enabled, upper;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & osxsave)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & amx_bf16) || !(d & amx_tile)) return false;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(upper) : "c"(0));
  if ((enabled & tile_state) != tile_state) return false;
  constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM: of the process, once for all
  if (syscall(SYS_arch_prctl, request_permission, tile_data)) return false;
#endif
  return true;
}

int64_t scratch_bytes(GemmSize size) {
  const int64_t panels = ceil_div(size.rows, PANEL) + ceil_div(size.columns, PANEL);
  return 4 * PANEL_ELEMENTS * panels * ceil_div(size.depth, DEPTH);
}

void multiply(const Bfloat16Operand& a, const Bfloat16Operand& b, const float* bias, const Result& c, GemmSize size,
              uint32_t* scratch, int threads) {
  const int64_t rows = size.rows, columns = size.columns, depth = size.depth;
  const int64_t a_panels = ceil_div(rows, PANEL), b_panels = ceil_div(columns, PANEL), blocks = ceil_div(depth, DEPTH);
  uint32_t* const b_scratch = scratch + a_panels * blocks * PANEL_ELEMENTS;
  auto steps = [&](int64_t k) { return least(DEPTH, depth - k * DEPTH); };
  if (rows * columns * depth < 1 << 20) threads = 1;

  parallel_for((a_panels + b_panels) * blocks, threads, [&](int64_t i) {
    const int64_t panel = i / blocks, k = i % blocks, first = panel * PANEL;
    uint32_t* const to = scratch + i * PANEL_ELEMENTS;
    if (panel >= a_panels) pack_tiles_of_b(b, columns, first - a_panels * PANEL, k * DEPTH, steps(k), to);
    else if (!lies_in_tiles(a, rows, first, steps(k))) pack_tiles_of_a(a, rows, first, k * DEPTH, steps(k), to);
  });
  auto panel_of_a = [&](int64_t first, int64_t k) -> PanelOfA {
    if (lies_in_tiles(a, rows, first, steps(k)))
      return {(const uint8_t*)(a.data + first * a.vector_stride + k * DEPTH), 2 * a.vector_stride, 2 * STEPS};
    return {(const uint8_t*)(scratch + (first / PANEL * blocks + k) * PANEL_ELEMENTS), 4 * TILE, 4 * PANEL * TILE};
  };

  // The panels of B one after another, for the rows of a task, which stay in the second-level cache.
  const int task_rows = least(TASK_ROWS, greatest(1, TASK_BYTES / (2 * PANEL * depth)) * PANEL);
  parallel_for(b_panels * ceil_div(rows, task_rows), threads, [&](int64_t task) {
    const int64_t j = task % b_panels, top = task / b_panels * task_rows;
    const int height = least(task_rows, rows - top), width = least(PANEL, columns - j * PANEL);
    const bool in_place = height % PANEL == 0 && width == PANEL;
    ResultTile<TASK_ROWS> tile(c, top, j * PANEL, height, width, columns, in_place);
    alignas(64) float first_row[PANEL] = {};
    if (bias) memcpy(first_row, bias + j * PANEL, sizeof(float) * (size_t)width);
    _tile_loadconfig(&CONFIG);
    for (int64_t k = 0; k < blocks; k++)
      for (int i = 0; i < height; i += PANEL) {
        float* const sums = tile.row(i);
        const uint32_t* const panel_of_b = b_scratch + (j * blocks + k) * PANEL_ELEMENTS;
        microkernel(panel_of_a(top + i, k), panel_of_b, (int)ceil_div(steps(k), STEPS), sums, tile.stride(),
                    k ? sums : first_row, k ? tile.stride() : 0);
      }
    _tile_release();
    tile.finish();
  });
}

}  // namespace

#ifdef DSQ_EMULATED_TILES
const Bfloat16Gemm AMX_EMULATED = {usable, scratch_bytes, multiply};
#else
const Bfloat16Gemm AMX = {usable, scratch_bytes, multiply};
#endif
