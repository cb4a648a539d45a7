// A tile of C on its way to a result that is narrower than float32, or quantized: sums stay in the first two caches until
// all of them are complete.
#pragma once

#include "../codec/codec.h"
#include "../codec/tile.h"
#include "gemm.h"

namespace {

// Sums as the upper halves of lanes; a NaN stays one.
INLINE U rounded_to(int32_t dtype, F x) {
  if (dtype == FLOAT16) return half_bits(x) << 16;
  return round_to_bf16((U)choose(x == x, x, splat(__builtin_nanf(""))));
}

// The part of C that one task computes: `rows` rows, `columns` of at most TILE_COLUMNS columns.
template <int ROWS> class ResultTile {
 public:
  // `in_place`: a result in float32 takes the sums themselves.
  ResultTile(const Result& result, int64_t row, int64_t column, int rows, int columns, int64_t all_columns,
             bool in_place = true)
      : result_(result), rows_(rows), columns_(columns), stride_(all_columns), at_(row * all_columns + column),
        direct_(in_place && result.dtype == FLOAT32 && !result.codec) {
    if (!direct_ && columns < TILE_COLUMNS) memset(sums_, 0, sizeof sums_);  // blocks are padded with zeros
  }
  // Where row `r` of the sums begins, and how far it is to the next.
  float* row(int64_t r) { return direct_ ? (float*)result_.to + at_ + r * stride_ : sums_ + r * TILE_COLUMNS; }
  // Fetches the place of `rows` rows from r on in the result, while their sums are computed.
  void prefetch(int64_t r, int rows) const {
    const int64_t item = size_of(result_.dtype), last = (TILE_COLUMNS - 1) * item;
    const uint8_t* to = (const uint8_t*)result_.to + (at_ + r * stride_) * item;
    for (int i = 0; i < rows; i++, to += stride_ * item) __builtin_prefetch(to, 1), __builtin_prefetch(to + last, 1);
  }
  int64_t stride() const { return direct_ ? stride_ : TILE_COLUMNS; }

  // Writes the result when all sums are complete.
  void finish() {
    if (direct_) return;
    if (result_.codec) {
      CodecDesc codec = *result_.codec;
      codec.outer = codec.rows = 1, codec.columns = rows_ * TILE_COLUMNS, codec.out_dtype = FLOAT32;
      quantize_tensor(codec, sums_, sums_, 1, 0);
    }
    const int64_t item = size_of(result_.dtype);
    const float* from = sums_;
    uint8_t* to = (uint8_t*)result_.to + at_ * item;
    for (int r = 0; r < rows_; r++, from += TILE_COLUMNS, to += stride_ * item) {
      if (result_.dtype == FLOAT32) {
        write_row(to, from);
        continue;
      }
      alignas(64) uint16_t halves[TILE_COLUMNS];
      for (int i = 0; i < TILE_COLUMNS; i += 2 * LANES)
        write(halves + i, upper_halves(rounded_to(result_.dtype, load(from + i)),
                                       rounded_to(result_.dtype, load(from + i + LANES))));
      write_row(to, halves);
    }
  }

 private:
  // By a few stores where the row is whole, as it mostly is.
  template <class T> INLINE void write_row(void* to, const T* row) const {
    if (columns_ == TILE_COLUMNS) memcpy(to, row, sizeof(T[TILE_COLUMNS]));
    else memcpy(to, row, sizeof(T) * (size_t)columns_);
  }

  const Result& result_;
  const int rows_, columns_;
  const int64_t stride_, at_;
  const bool direct_;
  alignas(64) float sums_[ROWS * TILE_COLUMNS];
};

}  // namespace
