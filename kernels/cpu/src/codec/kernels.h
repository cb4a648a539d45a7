// The kernels of one instruction set: a file defines LANES and includes this.
#pragma once

#include "../stash/affine.h"
#include "../stash/bernoulli.h"
#include "decode.h"
#include "encode.h"
#include "formats/grids.h"
#include "../stash/masks.h"

namespace {

uint32_t largest(const CodecJob& job, int64_t begin, int64_t end) {
  const int32_t dtype = job.desc->dtype, item = size_of(dtype);
  const uint8_t* const x = (const uint8_t*)job.values;
  I most[4] = {};
  for (; begin < end; begin += TILE) {
    F value[VECTORS];
    alignas(64) uint8_t few[TILE * 4] = {};
    const bool whole = begin + TILE <= end;
    if (!whole) memcpy(few, x + begin * item, (size_t)((end - begin) * item));
    load_tile(whole ? x + begin * item : few, dtype, value);
    EACH_VECTOR(v) most[v % 4] = max_of(most[v % 4], magnitude_bits(value[v]));
  }
  return largest_lane(max_of(max_of(most[0], most[1]), max_of(most[2], most[3])));
}

template <bool STOCHASTIC, class Sink, class Grid> void encode_on(const CodecJob& job, int64_t begin, int64_t end) {
  Encoder<STOCHASTIC, Sink, Grid> encoder{job};
  blocks_along_rows(*job.desc) ? encoder.rows(begin, end) : encoder.columns(begin, end);
  if constexpr (Grid::SIGNED)
    if (job.found) encoder.grid.report(*job.found);
}

template <bool STOCHASTIC, class Sink> void encode(const CodecJob& job, int64_t begin, int64_t end) {
  if (job.desc->scales == POWER) encode_on<STOCHASTIC, Sink, PowerGrid<STOCHASTIC>>(job, begin, end);
  else encode_on<STOCHASTIC, Sink, SignedGrid<STOCHASTIC>>(job, begin, end);
}

void quantize(const CodecJob& job, int64_t begin, int64_t end) {
  job.desc->stochastic ? encode<true, ValueSink>(job, begin, end) : encode<false, ValueSink>(job, begin, end);
  end_of_streams();
}

void pack(const CodecJob& job, int64_t begin, int64_t end) {
  job.desc->stochastic ? encode<true, CodeSink>(job, begin, end) : encode<false, CodeSink>(job, begin, end);
}

void unpack(const CodecJob& job, int64_t begin, int64_t end) {
  const auto run = [&](const auto& decoder) {
    blocks_along_rows(*job.desc) ? decoder.rows(begin, end) : decoder.columns(begin, end);
  };
  if (job.desc->scales == POWER) run(Decoder<PowerGrid<false>>{job});
  else run(Decoder<SignedGrid<false>>{job});
  end_of_streams();
}

constexpr IsaKernels kernels_of(const char* name, bool (*usable)()) {
  return {name, usable, largest, quantize, pack, unpack, quantize_grid, pack_grid, unpack_grid, mask, unmask, apply_mask,
          relu, scale_mask, bernoulli, affine_extents, affine_pack, affine_unpack};
}

}  // namespace
