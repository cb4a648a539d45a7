// The kernels of one instruction set: a file defines LANES and includes this.
#pragma once

#include "decode.h"
#include "encode.h"
#include "masks.h"

namespace {

uint32_t largest(const Job& job, int64_t begin, int64_t end) {
  const int32_t dtype = job.plan->dtype, item = size_of(dtype);
  const uint8_t* const x = (const uint8_t*)job.values;
  I most[4] = {};
  for (; begin < end; begin += STEP) {
    F value[UNITS];
    alignas(64) uint8_t few[STEP * 4] = {};
    const bool whole = begin + STEP <= end;
    if (!whole) memcpy(few, x + begin * item, (size_t)((end - begin) * item));
    load_step(whole ? x + begin * item : few, dtype, value);
    EACH_UNIT(u) most[u % 4] = max_of(most[u % 4], magnitude_bits(value[u]));
  }
  return largest_lane(max_of(max_of(most[0], most[1]), max_of(most[2], most[3])));
}

template <bool STOCHASTIC, class Sink> void encode(const Job& job, int64_t begin, int64_t end) {
  Encoder<STOCHASTIC, Sink> encoder{job};
  boxes_along_rows(*job.plan) ? encoder.rows(begin, end) : encoder.columns(begin, end);
}

void quantize(const Job& job, int64_t begin, int64_t end) {
  job.plan->stochastic ? encode<true, Values>(job, begin, end) : encode<false, Values>(job, begin, end);
  end_of_streams();
}

void pack(const Job& job, int64_t begin, int64_t end) {
  job.plan->stochastic ? encode<true, Codes>(job, begin, end) : encode<false, Codes>(job, begin, end);
}

void unpack(const Job& job, int64_t begin, int64_t end) {
  const Decoder decoder{job};
  boxes_along_rows(*job.plan) ? decoder.rows(begin, end) : decoder.columns(begin, end);
  end_of_streams();
}

}  // namespace
