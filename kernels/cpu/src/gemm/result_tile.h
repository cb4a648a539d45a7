// A tile of C on its way to a result that is narrower than float32, or quantised: sums stay in the first two caches until
// all of them are complete.
#pragma once

#include "../codec/codec.h"
#include "../codec/tile.h"
#include "gemm.h"
#include "packing.h"

namespace {

// 16 sums as the upper halves of lanes; a NaN stays one.
inline U rounded_to(int32_t dtype, __m512 x) {
  if (dtype == FLOAT16) return half_bits((F)x) << 16;
  const U sums = (U)_mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_ps(__builtin_nanf("")));
  return round_to_bf16(sums);
}

// The part of C that one task computes: `rows` rows, `columns` of at most TILE_COLUMNS columns.
template <int ROWS> class ResultTile {
 public:
  ResultTile(const Result& result, int64_t row, int64_t column, int rows, int columns, int64_t all_columns)
      : result_(result), rows_(rows), columns_(columns), stride_(all_columns), at_(row * all_columns + column),
        direct_(result.dtype == FLOAT32 && !result.codec) {
    if (!direct_ && columns < TILE_COLUMNS) memset(sums_, 0, sizeof sums_);  // boxes are padded with zeros
  }
  // Where row `r` of the sums begins, and how far it is to the next.
  float* row(int64_t r) { return direct_ ? (float*)result_.to + at_ + r * stride_ : sums_ + r * TILE_COLUMNS; }
  int64_t stride() const { return direct_ ? stride_ : TILE_COLUMNS; }

  // Writes the result when all sums are complete.
  void finish() {
    if (direct_) return;
    if (result_.codec) {
      CodecDesc codec = *result_.codec;
      codec.outer = codec.rows = 1, codec.columns = rows_ * TILE_COLUMNS, codec.out_dtype = FLOAT32;
      quantize_tensor(codec, sums_, sums_, 1, 0);
    }
    const __mmask16 left_mask = first16(columns_), right_mask = first16(columns_ - 16);
    const float* from = sums_;
    int64_t at = at_;
    for (int r = 0; r < rows_; r++, from += TILE_COLUMNS, at += stride_) {
      const __m512 left = _mm512_load_ps(from), right = _mm512_load_ps(from + 16);
      if (result_.dtype == FLOAT32) {
        _mm512_mask_storeu_ps((float*)result_.to + at, left_mask, left);
        _mm512_mask_storeu_ps((float*)result_.to + at + 16, right_mask, right);
      } else {
        const U both = upper_halves(rounded_to(result_.dtype, left), rounded_to(result_.dtype, right));
        _mm512_mask_storeu_epi16((uint16_t*)result_.to + at, first32(columns_), (__m512i)both);
      }
    }
  }

 private:
  const Result& result_;
  const int rows_, columns_;
  const int64_t stride_, at_;
  const bool direct_;
  alignas(64) float sums_[ROWS * TILE_COLUMNS];
};

}  // namespace
