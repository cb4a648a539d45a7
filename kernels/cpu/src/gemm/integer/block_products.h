// C = A B from packed codes, blocks along the contraction: an exact integer dot product over each block, times the two blocks'
// scale factors, summed in float32. Panels, of bytes or of integers of 16 bits (Code), and the order of tiles. The
// including file defines the dot products.
#pragma once

#include "../../codec/bits.h"
#include "../../codec/rounding.h"
#include "../../codec/formats/signed_steps.h"
#include "../../threads.h"
#include "packed.h"
#include "../result_tile.h"

namespace {

constexpr int PANEL = 2 * LANES;  // vectors of a panel
constexpr int ROWS = 4;           // of a register tile, PANEL columns wide
constexpr int TASK_ROWS = 64;     // of C in a task
constexpr int ELEMENT = 4;        // bytes of an element, the codes that a lane of 32 bits multiplies
constexpr int ELEMENTS_SIZE = PANEL * ELEMENT;  // bytes of an element of every vector
template <class Code> constexpr int STEPS = ELEMENT / (int)sizeof(Code);  // codes of an element
static_assert(PANEL % ROWS == 0 && TASK_ROWS % PANEL == 0, "tiles fill panels, and panels tasks");

int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// An operand's panels. A panel holds PANEL vectors: an element of every vector, then the next; the scale factors of a block
// of every vector, then of the next; and likewise the blocks' offsets, where they have any.
struct Panels {
  int64_t count, blocks, size;  // `size`: bytes of a panel's codes
  int8_t* codes;
  float* scales;
  float* offsets;
  void* end;

  Panels(int64_t vectors, int64_t depth, int block_size, int steps, bool has_offsets, void* memory)
      : count(ceil_div(vectors, PANEL)), blocks(ceil_div(depth, block_size)), size(blocks * (block_size / steps) * ELEMENTS_SIZE),
        codes((int8_t*)memory), scales((float*)(codes + count * size)), offsets(scales + count * blocks * PANEL),
        end(offsets + (has_offsets ? count * blocks * PANEL : 0)) {}
  int8_t* codes_of(int64_t panel) const { return codes + panel * size; }
  float* scales_of(int64_t panel) const { return scales + panel * blocks * PANEL; }
  float* offsets_of(int64_t panel) const { return offsets + panel * blocks * PANEL; }
};

// The codes of an element in each lane.
INLINE I joined(const I (&code)[2]) { return (code[0] & 65535) | code[1] << 16; }
INLINE I joined(const I (&code)[4]) {
  return (code[0] & 255) | (code[1] & 255) << 8 | (code[2] & 255) << 16 | code[3] << 24;
}

typedef VECTOR(uint8_t, 4 * LANES) Bytes;

// Reads packed codes as integers.
struct Integers {
  const Unpacker unpacker;
  const int digits, places;

  explicit Integers(const PackedVectors& x)
      : unpacker(x.code_bits), digits(x.digits), places((1 << (x.code_bits - 1)) - 1) {}
  INLINE I vector(const uint8_t* from, int v) const {
    const I code = unpacker.vector(from, v);
    return digits ? of_element(code) : code;
  }
  INLINE I of_element(I code) const {
    const I place = code & places, binade = place >> digits, sign = code >> 31;
    const I leading = (binade > 0) & (1 << digits), whole = leading | (place & ((1 << digits) - 1));
    const I magnitude = whole << (max_of(binade, I{} + 1) - 1);
    return (magnitude ^ sign) - sign;
  }
};

// A tile's codes, plus `more`.
INLINE void unpack(const Integers& integers, const uint8_t* from, int more, int8_t (&to)[TILE]) {
  for (int v = 0; v < VECTORS; v += 4) {
    const I code[4] = {integers.vector(from, v), integers.vector(from, v + 1), integers.vector(from, v + 2),
                       integers.vector(from, v + 3)};
    write(to + v * LANES, (Bytes)narrow_to_bytes(code) + (uint8_t)more);
  }
}
INLINE void unpack(const Integers& integers, const uint8_t* from, int more, int16_t (&to)[TILE]) {
  for (int v = 0; v < VECTORS; v++)
    write(to + v * LANES, __builtin_convertvector(integers.vector(from, v) + more, I16));
}

// `steps` codes of every vector, plus `more`; any number times a zero of the other operand where there is no code.
template <class Code> void pack_codes(const PackedVectors& x, int64_t vector, int64_t steps, int more, int8_t* panel) {
  constexpr int per_element = STEPS<Code>;
  const Integers integers(x);
  const int bits = x.code_bits;
  const int vectors = least(PANEL, x.vectors - vector);
  const int64_t row_bytes = x.row_bytes();
  const uint8_t* const end = x.codes + (x.across ? x.depth : x.vectors) * row_bytes;
  if (vectors < PANEL || x.depth < steps) memset(panel, 0, (size_t)(steps / per_element * ELEMENTS_SIZE));
  if (x.across) {
    const uint8_t* row = x.codes + vector / 8 * bits;
    for (int64_t k = 0; k < x.depth; k += per_element, panel += ELEMENTS_SIZE) {
      const uint8_t* rows[per_element];
      uint8_t few[per_element][2 * PANEL + 16];
      for (int step = 0; step < per_element; step++, row += row_bytes) {
        const bool stored = k + step < x.depth;
        rows[step] = stored && vectors == PANEL && end - row >= (int64_t)sizeof few[step] ? row : few[step];
        if (rows[step] == row) continue;
        memset(few[step], 0, sizeof few[step]);
        if (stored) memcpy(few[step], row, (size_t)ceil_div(vectors * bits, 8));
      }
      for (int v = 0; v < PANEL / LANES; v++) {
        I code[per_element];
        for (int step = 0; step < per_element; step++) code[step] = integers.vector(rows[step], v) + more;
        write(panel + v * LANES * ELEMENT, joined(code));
      }
    }
    return;
  }
  const uint8_t* row = x.codes + vector * row_bytes;
  for (int first = 0; first < vectors; first += LANES, row += LANES * row_bytes)
    for (int64_t k = 0; k < x.depth; k += TILE) {
      Code codes[LANES][TILE];
      const int count = least(TILE, x.depth - k), elements = (int)ceil_div(count, per_element);
      for (int i = 0; i < LANES; i++) {
        uint8_t few[2 * TILE + 16];
        const uint8_t* from = row + i * row_bytes + k / 8 * bits;
        if (first + i >= vectors) {
          memset(codes[i], 0, sizeof codes[i]);
          continue;
        }
        if (count < TILE || end - from < (int64_t)sizeof few) {
          memset(few, 0, sizeof few);
          memcpy(few, from, (size_t)ceil_div(count * bits, 8));
          from = few;
        }
        unpack(integers, from, more, codes[i]);
      }
      int8_t* to = panel + k / per_element * ELEMENTS_SIZE + first * ELEMENT;
      for (int e = 0; e < elements; e += LANES) {
        I lanes[LANES];
        for (int i = 0; i < LANES; i++) lanes[i] = read<I>(codes[i] + e * per_element);
        transpose(lanes);
        for (int i = 0; i < LANES && e + i < elements; i++) write(to + (e + i) * ELEMENTS_SIZE, lanes[i]);
      }
    }
}

// The scale factors of a panel; any number where there is no vector.
void fill_scales(const PackedVectors& x, int64_t vector, int64_t blocks, float* scales) {
  const SignedSteps steps(x.bits, x.tensor_exponent());
  const int vectors = least(PANEL, x.vectors - vector);
  for (int64_t index = 0; index < blocks; index++)
    for (int first = 0; first < PANEL; first += LANES, scales += LANES) {
      uint8_t stored[LANES] = {};
      const uint8_t* from = x.exponents + index * x.to_next_block() + (vector + first) * x.to_next_vector();
      for (int i = 0; i < LANES && first + i < vectors; i++) stored[i] = from[i * x.to_next_vector()];
      const I scale = widened(stored);
      write(scales, x.kind == POWER ? AnyFactors(scale, x.bits).values_of(splat(1.0f)) : steps.of(scale));
    }
}

// The operands of a microkernel: some rows of A's panel, from `a` and `a_scales` on, and B's panel. It writes `rows` by
// `columns` of the tile of C, which begin with the bias. A block has `elements` elements.
struct BlockTile {
  const int8_t* a;
  const float* a_scales;
  const int8_t* b;
  const float* b_scales;
  const float* b_offsets;
  int64_t blocks;
  int elements;
  const float* bias;
  float* c;
  int64_t stride;
  int rows, columns;
};

// Bytes of the panels of both operands.
template <class Code, bool OFFSETS> int64_t panels_size(GemmSize size, int block_size) {
  const Panels a(size.rows, size.depth, block_size, STEPS<Code>, false, nullptr);
  return (int64_t)Panels(size.columns, size.depth, block_size, STEPS<Code>, OFFSETS, a.end).end;
}

// With OFFSETS, A's codes grow by half their range, `more`, which takes their signs away: offset(more, elements, a block's
// codes in a panel of B, to) says by how much that changes the block's dot products, and b_offsets has that times B's scale
// factors.
template <class Code, bool OFFSETS, class Offset>
void multiply(const PackedOperand& a, const PackedOperand& b, bool one_scale, int block_size, const float* bias,
              const Result& c, GemmSize size, void* scratch, int threads, void (*microkernel)(const BlockTile&),
              const Offset& offset) {
  const PackedVectors A = packed(a, block_size, one_scale, size.rows, size.depth);
  const PackedVectors B = packed(b, block_size, one_scale, size.columns, size.depth);
  const Panels left(size.rows, size.depth, block_size, STEPS<Code>, false, scratch);
  const Panels right(size.columns, size.depth, block_size, STEPS<Code>, OFFSETS, left.end);
  if (size.rows * size.columns * size.depth < 1 << 20) threads = 1;
  const int elements = block_size / STEPS<Code>, more = OFFSETS ? 1 << (a.bits - 1) : 0;

  parallel_for(left.count + right.count, threads, [&](int64_t i) {
    const bool of_a = i < left.count;
    const PackedVectors& x = of_a ? A : B;
    const Panels& panels = of_a ? left : right;
    const int64_t panel = of_a ? i : i - left.count;
    pack_codes<Code>(x, panel * PANEL, panels.blocks * block_size, of_a ? more : 0, panels.codes_of(panel));
    fill_scales(x, panel * PANEL, panels.blocks, panels.scales_of(panel));
    if constexpr (OFFSETS)
      for (int64_t n = 0; !of_a && n < right.blocks; n++) {
        const float* scales = right.scales_of(panel) + n * PANEL;
        float* to = right.offsets_of(panel) + n * PANEL;
        offset(more, elements, right.codes_of(panel) + n * elements * ELEMENTS_SIZE, to);
        for (int v = 0; v < PANEL; v++) to[v] *= scales[v];
      }
  });

  const int64_t tiles = ceil_div(size.columns, TILE_COLUMNS);
  parallel_for(tiles * ceil_div(size.rows, TASK_ROWS), threads, [&](int64_t task) {
    const int64_t top = task / tiles * TASK_ROWS, first = task % tiles * TILE_COLUMNS;
    const int height = least(TASK_ROWS, size.rows - top), width = least(TILE_COLUMNS, size.columns - first);
    ResultTile<TASK_ROWS> tile(c, top, first, height, width, size.columns);
    for (int column = 0; column < width; column += PANEL)
      for (int row = 0; row < height; row += ROWS) {
        if (column == 0) tile.prefetch(row, least(ROWS, height - row));
        const int64_t i = (top + row) / PANEL, j = (first + column) / PANEL, below = (top + row) % PANEL;
        microkernel({left.codes_of(i) + below * ELEMENT, left.scales_of(i) + below, right.codes_of(j),
                     right.scales_of(j), right.offsets_of(j), left.blocks, elements,
                     bias ? bias + first + column : nullptr, tile.row(row) + column, tile.stride(),
                     least(ROWS, height - row), least(PANEL, width - column)});
      }
    tile.finish();
  });
}

}  // namespace
