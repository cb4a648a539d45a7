// Packed codes and scales as the integer GEMMs read them.
#pragma once

#include "../division.h"
#include "gemm.h"

namespace {

struct PackedVectors {
  const uint8_t* codes;
  const uint8_t* exponents;  // one for each box, or one for the tensor
  int32_t kind;              // enum Scales
  int32_t bits, box;
  bool one_exponent;
  bool across;  // a row of codes holds one step of every vector, else one vector's steps
  int64_t vectors, depth;

  int64_t row_bytes() const { return ceil_div((across ? vectors : depth) * bits, 8); }
  // From one vector's exponent to the next vector's, and from one box's to the next box's.
  int64_t to_next_vector() const { return one_exponent ? 0 : across ? 1 : ceil_div(depth, box); }
  int64_t to_next_box() const { return one_exponent ? 0 : across ? vectors : 1; }
  // The tensor's own exponent, which SIGNED_E4M3 stores after the boxes' scales.
  int tensor_exponent() const { return kind == SIGNED_E4M3 ? clipped(exponents[vectors * ceil_div(depth, box)]) : 0; }
};

inline PackedVectors packed(const PackedOperand& x, int box, bool one_scale, int64_t vectors, int64_t depth) {
  return {x.codes, x.scales, x.kind, x.bits, box, one_scale, x.across, vectors, depth};
}

}  // namespace
