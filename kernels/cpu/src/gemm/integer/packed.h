// Packed codes and scales as the integer GEMMs read them.
#pragma once

#include "../../division.h"
#include "../gemm.h"

namespace {

struct PackedVectors {
  const uint8_t* codes;
  const uint8_t* exponents;  // one for each block, or one for the tensor
  int32_t kind;              // enum Scales
  int32_t bits, block_size;
  bool one_exponent;
  bool across;  // a row of codes holds one step of every vector, else one vector's steps
  int digits, code_bits;  // see PackedOperand
  int64_t vectors, depth;

  int64_t row_bytes() const { return ceil_div((across ? vectors : depth) * code_bits, 8); }
  // From one vector's exponent to the next vector's, and from one block's to the next block's.
  int64_t to_next_vector() const { return one_exponent ? 0 : across ? 1 : ceil_div(depth, block_size); }
  int64_t to_next_block() const { return one_exponent ? 0 : across ? vectors : 1; }
  // The tensor's own exponent, which SIGNED_E4M3 stores after the blocks' scales.
  int tensor_exponent() const { return kind == SIGNED_E4M3 ? clipped(exponents[vectors * ceil_div(depth, block_size)]) : 0; }
};

inline PackedVectors packed(const PackedOperand& x, int block_size, bool one_scale, int64_t vectors, int64_t depth) {
  return {x.codes, x.scales, x.kind,   x.bits,  block_size, one_scale, x.across, x.digits, x.digits ? x.code_bits : x.bits,
          vectors, depth};
}

}  // namespace
