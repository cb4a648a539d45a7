// Packing of operands in bfloat16.
#pragma once

#include "gemm.h"
#include "packing.h"

namespace {

// Packs the `width` vectors of x, which has `vectors`, from vector `first` on, over `depth` steps from k on.
template <int width>
void pack(const Bfloat16Operand& x, int64_t vectors, int64_t first, int64_t k, int depth, uint32_t* panel) {
  const int present = least(width, vectors - first);
  const uint16_t* from = x.data + first * x.vector_stride + k * x.depth_stride;
  if (x.depth_stride == 1)
    return pack_vectors<width>(
        [&](int i, int element) {
          const int left = i < present ? depth - 2 * element : 0;
          return _mm512_maskz_loadu_epi16(first32(left), left > 0 ? from + i * x.vector_stride + 2 * element : from);
        },
        (depth + 1) / 2, panel);
  const __mmask32 mask = first32(present);
  pack_steps<width>([&](int i) { return _mm512_maskz_loadu_epi16(mask, from + i * x.depth_stride); }, depth, panel);
}

}  // namespace
