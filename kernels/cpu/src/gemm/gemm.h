// The GEMMs on quantized operands: c = a b + bias with exact products of values and sums in float32.
//
// A vector is a row of a or a column of b, along the contraction. `scratch` has the number of bytes that the function
// ..._scratch returns.
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

// Packed codes (dsq/formats.py says how codes and scales lie).
struct PackedOperand {
  const uint8_t *codes, *scales;
  int kind;  // enum Scales
  int bits;  // of the integers
  bool across;  // a row of codes holds one index of the contraction, for every vector; else one vector
  // 0: codes are integers. Else they are elements of a grid with so many digits, a sign and the place of the magnitude
  // in `code_bits` bits, multiplied as integers in the unit of the finest step.
  int digits = 0, code_bits = 0;
};

// Where the sums go, each rounded once to the dtype: rows side by side in memory. `codec`, unless null, quantizes them
// first, float32 to float32, to nearest, in blocks of columns that divide TILE_COLUMNS.
struct Result {
  void* to;
  int32_t dtype;
  const CodecDesc* codec;
};
constexpr int TILE_COLUMNS = 32;  // of a register tile

// On values in bfloat16, by some machine's instructions.
struct Bfloat16Gemm {
  bool (*usable)();
  int64_t (*scratch)(GemmSize size);
  void (*multiply)(const Bfloat16Operand& a, const Bfloat16Operand& b, const float* bias, const Result& c,
                   GemmSize size, uint32_t* scratch, int threads);
};
extern const Bfloat16Gemm BFLOAT16_AVX512, AMX, AMX_EMULATED;

// The kernel of an enum GemmKernel, or null: it takes no values in bfloat16, or was not built for this kind of machine.
inline const Bfloat16Gemm* bfloat16_gemm(int gemm) {
#ifdef DSQ_X86
  if (gemm == GEMM_BFLOAT16) return &BFLOAT16_AVX512;
#endif
#ifdef DSQ_AMX
  if (gemm == GEMM_AMX) return &AMX;
  if (gemm == GEMM_AMX_EMULATED) return &AMX_EMULATED;
#endif
  return nullptr;
}

// On packed codes, by some machine's instructions. Blocks of `block_size` values along the depth, or one scale an operand; a dot
// product over a block must fit 32 bits.
struct IntegerGemm {
  const char* name;
  bool (*usable)();
  bool (*fits)(int a_bits, int b_bits, int block_size);  // of blocks that divide 256
  int64_t (*scratch)(GemmSize size, int a_bits, int b_bits, int block_size);
  void (*multiply)(const PackedOperand& a, const PackedOperand& b, bool one_scale, int block_size, const float* bias,
                   const Result& c, GemmSize size, uint32_t* scratch, int threads);
};
extern const IntegerGemm INTEGER_AVX512, INTEGER_AVXVNNI, INTEGER_AVX2, INTEGER_NEON;

// dsq_integer_gemm and dsq_use_integer_gemm of abi.h, and the kernel in use, or null.
const char* integer_gemm_name(int index, int* usable);
void use_integer_gemm(int index);
const IntegerGemm* integer_gemm();
