// The outputs of the encoder's tiles: values, or codes.
#pragma once

#include "bits.h"

namespace {

struct ValueSink {
  static constexpr bool VALUES = true;
  uint8_t* out;
  int64_t columns;
  int32_t dtype;
  bool past_caches, prefetches, exact;

  explicit ValueSink(const CodecJob& job)
      : out((uint8_t*)job.out), columns(job.desc->columns), dtype(job.desc->out_dtype), past_caches(job.past_caches),
        prefetches(job.prefetch), exact(exact_in_bf16(*job.desc)) {}
  uint8_t* place(int64_t row, int64_t column) const { return out + (row * columns + column) * size_of(dtype); }
  size_t size(int n) const { return (size_t)(n * size_of(dtype)); }
  int tile_stride() const { return TILE * size_of(dtype); }
  // `ordinary` values are normal numbers
  INLINE void put(const F value[VECTORS], uint8_t* to, bool ordinary) const {
    store_tile(to, dtype, value, ordinary && past_caches, exact && ordinary);
  }
  // The tile `bytes` after `to` is soon to be written.
  INLINE void prefetch_ahead(const uint8_t* to, int bytes) const {
    if (prefetches) prefetch<3, true>((uintptr_t)to + bytes, tile_stride());
  }
};

struct CodeSink {
  static constexpr bool VALUES = false;
  uint8_t* out;
  int64_t row_bytes;
  int bits;

  explicit CodeSink(const CodecJob& job) : out(job.codes), row_bytes(job.desc->row_bytes), bits(job.desc->bits) {}
  uint8_t* place(int64_t row, int64_t column) const { return out + row * row_bytes + column / 8 * bits; }
  size_t size(int n) const { return (size_t)ceil_div(n * bits, 8); }
  int tile_stride() const { return TILE / 8 * bits; }
  INLINE void prefetch_ahead(const uint8_t*, int) const {}  // few cache lines
  INLINE void put(const I code[VECTORS], uint8_t* to) const {
    switch (bits) {
      case 2: return pack_tile<2>(code, bits, to);
      case 4: return pack_tile<4>(code, bits, to);
      case 6: return pack_tile<6>(code, bits, to);
      case 8: return pack_tile<8>(code, bits, to);
      case 16: return pack_tile<16>(code, bits, to);
      default: return pack_tile<0>(code, bits, to);
    }
  }
};

}  // namespace
