// The GEMMs on quantised operands: c = a b + bias with exact products of values and sums in float32.
//
// A vector is a row of a or a column of b: what the contraction runs along. `scratch` has the bytes that the function
// ..._scratch asks for.
#pragma once

#include "../api.h"

struct GemmSize {
  int64_t rows, columns, depth;
};

// Values in bfloat16. One of the strides, in values, is 1.
struct Bfloat16Operand {
  const uint16_t* data;
  int64_t vector_stride, depth_stride;
};

// Packed codes (dsq/formats/layout.py says how codes and scales lie).
struct PackedOperand {
  const uint8_t *codes, *scales;
  int kind;  // enum Scales
  int bits;
  bool across;  // a row of codes holds one index of the contraction, for every vector; else one vector
};

// Where the sums go, each rounded once to the dtype: rows side by side in memory. `codec`, unless null, quantises them
// first, float32 to float32, to nearest, in boxes of columns that divide TILE_COLUMNS.
struct Result {
  void* to;
  int32_t dtype;
  const CodecDesc* codec;
};
constexpr int TILE_COLUMNS = 32;  // of a register tile

bool gemm_bfloat16_usable();
int64_t gemm_bfloat16_scratch(GemmSize size);
void gemm_bfloat16(const Bfloat16Operand& a, const Bfloat16Operand& b, const float* bias, const Result& c,
                   GemmSize size, uint32_t* scratch, int threads);

// The widest codes that gemm_integer takes: NEON multiplies wider ones no faster than float32.
#ifdef DSQ_ARM
constexpr int INTEGER_BITS = 8;
#else
constexpr int INTEGER_BITS = 16;
#endif
// Boxes of `box` values along the depth, or one scale an operand. `box` divides 256 and is a multiple of
// 32 / INTEGER_BITS; a dot product over it must fit 32 bits.
bool gemm_integer_usable();
int64_t gemm_integer_scratch(GemmSize size, int box);
void gemm_integer(const PackedOperand& a, const PackedOperand& b, bool one_scale, int box, const float* bias,
                  const Result& c, GemmSize size, uint32_t* scratch, int threads);
