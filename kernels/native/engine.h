// The kernels of one instruction set: a file defines LANES and includes this.
//
// Work goes a STEP of columns at a time: exponents, then codes, then where they go (a Sink): back to values, or into
// bits. Boxes along the rows do the same for a box's rows one after another, under one set of exponents. Where fewer
// columns than a CHUNK are left, they go through copies filled up with zeros, which alter neither a largest value nor a
// code.
#pragma once

#include "bits.h"
#include "rounding.h"

namespace {

// ---- where codes go: a place for the chunk of `n` columns at (row, column), steps put there, then finish ----

template <class Out> struct Values {
  typedef Out Unit;
  static constexpr bool ZERO_NAN = false, DIRECT = true;
  static constexpr int ROOM = CHUNK;

  Out* out;
  int64_t columns;
  bool stream_out;

  explicit Values(const Job& job) : out((Out*)job.out), columns(job.plan->columns), stream_out(job.stream) {}
  Out* place(int64_t row, int64_t column) const { return out + row * columns + column; }
  Out* step_of(Out* to, int i) const { return to + i; }
  size_t size(int n) const { return (size_t)n * sizeof(Out); }

  template <class GetFactors> INLINE void put(const I code[UNITS], GetFactors factors, Out* to, bool whole) const {
    if (whole && stream_out) {
#pragma GCC unroll 16
      for (int u = 0; u < UNITS; u++) stream(to + u * LANES, decode_lanes(code[u], factors(u * LANES)));
    } else {
#pragma GCC unroll 16
      for (int u = 0; u < UNITS; u++) store(to + u * LANES, decode_lanes(code[u], factors(u * LANES)));
    }
  }
};

template <int WIDTH> struct Codes {
  typedef uint8_t Unit;
  static constexpr bool ZERO_NAN = true, DIRECT = WIDTH != 0;
  static constexpr int ROOM = CHUNK * 2 + 16;

  uint8_t* out;
  int64_t row_bytes;
  int bits;

  explicit Codes(const Job& job) : out(job.codes), row_bytes(job.plan->row_bytes), bits(WIDTH ? WIDTH : job.plan->bits) {}
  uint8_t* place(int64_t row, int64_t column) const { return out + row * row_bytes + column / 8 * bits; }
  uint8_t* step_of(uint8_t* to, int i) const { return to + i / 8 * bits; }
  size_t size(int n) const { return (size_t)ceil_div(n * bits, 8); }

  template <class GetFactors> INLINE void put(const I code[UNITS], GetFactors, uint8_t* to, bool) const {
    pack_step<WIDTH>(code, bits, to);
  }
};

// Calls step(x, to, i, whole) for the steps i = 0, 64 of the chunk of n columns at (row, column); decoding has no x.
template <class In, class Sink, class Step>
INLINE void each_step(const In* x, int n, const Sink& sink, int64_t row, int64_t column, Step step) {
  typename Sink::Unit* target = sink.place(row, column);
  if (n == CHUNK && Sink::DIRECT) {
    for (int i = 0; i < CHUNK; i += STEP) step(x + i, sink.step_of(target, i), i, true);
    return;
  }
  alignas(64) In few[CHUNK];
  alignas(64) typename Sink::Unit waiting[Sink::ROOM];
  if (x && n < CHUNK) {
    memset(few, 0, sizeof few);
    memcpy(few, x, (size_t)n * sizeof(In));
    x = few;
  }
  for (int i = 0; i < n; i += STEP) step(x ? x + i : x, sink.step_of(waiting, i), i, false);
  memcpy(target, waiting, sink.size(n));
}

// ---- exponents ----

// The largest stored exponent of each of a step's groups of 16 columns, a byte each.
INLINE uint32_t exponents_of(const F x[UNITS]) {
  constexpr int units = 16 / LANES;
  I most[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; g++) {
    most[g] = units == 1 ? (I)x[g] : magnitude_bits(x[g * units]);
#pragma GCC unroll 4
    for (int u = 1; u < units; u++) most[g] = max_of(most[g], magnitude_bits(x[g * units + u]));
  }
  return four_exponents(most[0], most[1], most[2], most[3]);
}

template <class In> INLINE void load_step(const In* x, F value[UNITS]) {
#pragma GCC unroll 16
  for (int u = 0; u < UNITS; u++) value[u] = load(x + u * LANES);
}

// ---- a step, under exponents of its groups or its columns ----

// Whether four exponents, a byte each, are all within least..MOST_ORDINARY.
INLINE bool all_ordinary(uint32_t four, uint32_t least) {
  constexpr uint32_t each = 0x01010101, tops = 0x80808080, beyond = 255 - MOST_ORDINARY;
  const uint32_t below = (four - each * least) & ~four, above = (~four - each * beyond) & four;
  return !((below | above) & tops);
}

template <bool STOCHASTIC, bool QUICK, class Sink, class GetFactors>
INLINE void encode_step(const F x[UNITS], GetFactors factors, F max_code, const Numbers& random, int i, const Sink& sink,
                        typename Sink::Unit* to, bool whole) {
  I code[UNITS];
#pragma GCC unroll 16
  for (int u = 0; u < UNITS; u++)
    code[u] = round_to_code<STOCHASTIC, QUICK, Sink::ZERO_NAN>(x[u], factors(u * LANES), max_code, random, i + u * LANES);
  sink.put(code, factors, to, whole);
}

template <bool STOCHASTIC, class In, class Sink> struct Encoder {
  const Job& job;
  const Plan& p = *job.plan;
  const Scales& scales = *job.scales;
  const F max_code = splat((float)((1 << (p.bits - 1)) - 1));
  const int least = least_ordinary(p);
  const bool follows_values = p.box || p.exponent < 0;  // else a code may be far beyond its range
  const Sink sink{job};
  Random random{job.seed};

  int left(int64_t column) const { return (int)(p.columns - column < CHUNK ? p.columns - column : CHUNK); }
  const In* values(int64_t row, int64_t column) const { return (const In*)job.values + row * p.columns + column; }

  // A step under one exponent for each 16 columns.
  INLINE void under_four(const F value[UNITS], uint32_t four, int slot, int i, typename Sink::Unit* to,
                         bool whole) const {
    if (follows_values && all_ordinary(four, (uint32_t)least)) {
      const FourQuickFactors<STOCHASTIC> quick(four, p.bits);
      auto factors = [&](int c) ALWAYS { return quick.at(c); };
      encode_step<STOCHASTIC, true>(value, factors, max_code, random.drawn[slot], i, sink, to, whole);
    } else {
      auto factors = [&](int c) ALWAYS { return group_factors<STOCHASTIC>(scales, four >> c / 16 * 8 & 255); };
      encode_step<STOCHASTIC, false>(value, factors, max_code, random.drawn[slot], i, sink, to, whole);
    }
  }

  // Boxes of 16 along the columns of one chunk, whole or not.
  void boxes_of_16(int64_t row, int64_t column) {
    const In* x = values(row, column);
    const int n = left(column);
    alignas(64) In few[CHUNK] = {};
    if (n < CHUNK) x = (const In*)memcpy(few, x, (size_t)n * sizeof(In));
    uint8_t exponent[CHUNK / 16] = {};
    for (int i = 0; i < n; i += STEP) {
      F value[UNITS];
      load_step(x + i, value);
      const uint32_t four = exponents_of(value);
      memcpy(exponent + i / 16, &four, 4);
    }
    if (job.exponents)
      memcpy(job.exponents + row * ceil_div(p.columns, 16) + column / 16, exponent, (size_t)ceil_div(n, 16));
    under_groups(row, column, exponent);
  }

  // The same for whole chunks first..last of a row, a batch at a time. May write 16 bytes beyond them.
  void whole_boxes_of_16(int64_t row, int64_t first, int64_t last) {
    constexpr int steps = CHUNK / STEP;
    uint8_t* exponent = job.exponents ? job.exponents + row * ceil_div(p.columns, 16) + first / 16 : nullptr;
    for (int64_t column = first; column < last; column += BATCH * CHUNK) {
      const int64_t left_chunks = (last - column) / CHUNK;
      const int chunks = left_chunks < BATCH ? (int)left_chunks : BATCH;
      const In* x = values(row, column);
      typename Sink::Unit* to = sink.place(row, column);
      uint32_t four[BATCH * steps];
      F value[UNITS];
      for (int i = 0; i < chunks * steps; i++) {
        load_step(x + i * STEP, value);
        four[i] = exponents_of(value);
      }
      if (STOCHASTIC)
        for (int c = 0; c < chunks; c++) random.draw(c, row, column / CHUNK + c);
      for (int i = 0; i < chunks * steps; i++) {
        load_step(x + i * STEP, value);
        under_four(value, four[i], i / steps, i % steps * STEP, to, true);
        to = sink.step_of(to, STEP);
      }
      if (exponent) {
        memcpy(exponent, four, (size_t)chunks * steps * 4);
        exponent += chunks * steps * 4;
      }
    }
  }

  // Exponents known, one for each 16 columns of the chunk.
  __attribute__((noinline)) void under_groups(int64_t row, int64_t column, const uint8_t exponent[CHUNK / 16]) {
    each_step(values(row, column), left(column), sink, row, column,
              [&](const In* x, typename Sink::Unit* to, int i, bool whole) ALWAYS {
                F value[UNITS];
                load_step(x, value);
                uint32_t four;
                memcpy(&four, exponent + i / 16, 4);
                under_four(value, four, 0, i, to, whole);
              });
  }

  // Exponents known, one for each column of the chunk.
  template <bool QUICK>
  __attribute__((noinline)) void under_columns(int64_t row, int64_t column, const ColumnFactors<STOCHASTIC>& by_column, int slot) {
    each_step(values(row, column), left(column), sink, row, column,
              [&](const In* x, typename Sink::Unit* to, int i, bool whole) ALWAYS {
                F value[UNITS];
                load_step(x, value);
                auto factors = [&](int c) ALWAYS { return by_column.at(i + c); };
                encode_step<STOCHASTIC, QUICK>(value, factors, max_code, random.drawn[slot], i, sink, to, whole);
              });
  }

  // The exponents of boxes of any size along the columns first..last - 1, which hold whole boxes.
  void find_exponents(int64_t row, int64_t first, int64_t last, uint8_t exponent[CHUNK]) const {
    memset(exponent, 0, CHUNK);
    for (int64_t column = first; column < last; column++) {
      float value[LANES];
      In few[LANES] = {*values(row, column)};
      write(value, load(few));
      uint32_t magnitude;
      memcpy(&magnitude, value, 4);
      magnitude = (magnitude & 0x7fffffff) >> 23;
      uint8_t& e = exponent[(column - first) / p.box];
      e = magnitude > e ? (uint8_t)magnitude : e;
    }
  }

  // Boxes of any size along the columns of a strip of whole boxes.
  void boxes_of_any_size(int64_t row, int64_t first, int64_t last) {
    uint8_t exponent[CHUNK], group[CHUNK / 16];
    ColumnFactors<STOCHASTIC> by_column;
    find_exponents(row, first, last, exponent);
    if (job.exponents)
      memcpy(job.exponents + row * ceil_div(p.columns, p.box) + first / p.box, exponent,
             (size_t)ceil_div(last - first, p.box));
    for (int64_t column = first; column < last; column += CHUNK) {
      if (STOCHASTIC) random.draw(0, row, column / CHUNK);
      if (p.box % 16 == 0) {
        for (int g = 0; g < CHUNK / 16; g++) group[g] = exponent[(column - first + 16 * g) / p.box % CHUNK];
        under_groups(row, column, group);
      } else {
        for (int i = 0; i < CHUNK; i++) by_column.set(scales, i, exponent[(column - first + i) / p.box % CHUNK]);
        under_columns<false>(row, column, by_column, 0);
      }
    }
  }

  void columns(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    int64_t row = begin / tasks.strips, strip = begin % tasks.strips;
    uint8_t whole_tensor[CHUNK / 16];
    memset(whole_tensor, job.tensor_exponent, sizeof whole_tensor);
    const int64_t whole = p.columns / CHUNK;  // strips of boxes of 16
    for (int64_t task = begin; task < end; task++) {
      const int64_t column = strip * tasks.width;
      int64_t run = whole - strip < end - task ? whole - strip : end - task;
      if (!Sink::DIRECT) run--;  // so that what is written beyond is still to be written
      if (p.box == 16 && run > 0) {
        whole_boxes_of_16(row, column, column + run * CHUNK);
        task += run - 1, strip += run;
        if (strip == tasks.strips) strip = 0, row++;
        continue;
      }
      if (STOCHASTIC && (p.box == 16 || p.box == 0)) random.draw(0, row, column / CHUNK);
      if (p.box == 16) boxes_of_16(row, column);
      else if (p.box == 0) under_groups(row, column, whole_tensor);
      else boxes_of_any_size(row, column, column + tasks.width < p.columns ? column + tasks.width : p.columns);
      if (++strip == tasks.strips) strip = 0, row++;
    }
  }

  // ---- boxes along the rows ----

  // The largest magnitude bits of each of n columns from `column`, over rows top..bottom - 1. Rows are read one after
  // another, as far as they go, which is how memory is fastest.
  void largest_of_columns(int64_t top, int64_t bottom, int64_t column, int n, int32_t most[BATCH * CHUNK]) const {
    memset(most, 0, BATCH * CHUNK * sizeof *most);
    for (int64_t row = top; row < bottom; row++) {
      const In* x = values(row, column);
      int i = 0;
      for (; i + STEP <= n; i += STEP) {
#pragma GCC unroll 16
        for (int u = i; u < i + STEP; u += LANES) write(most + u, max_of(read<I>(most + u), magnitude_bits(load(x + u))));
      }
      if (i == n) continue;
      In few[STEP] = {};
      memcpy(few, x + i, (size_t)(n - i) * sizeof(In));
      for (int u = 0; u < STEP; u += LANES)
        write(most + i + u, max_of(read<I>(most + i + u), magnitude_bits(load(few + u))));
    }
  }

  // A chunk's factors; whether its exponents are ordinary.
  bool set_factors(const int32_t most[CHUNK], const uint8_t exponent[CHUNK], ColumnFactors<STOCHASTIC>& factors) const {
    bool ordinary = true;
    for (int i = 0; i < CHUNK; i++) ordinary &= exponent[i] >= least && exponent[i] <= MOST_ORDINARY;
    if (ordinary)
      for (int i = 0; i < CHUNK; i += LANES) factors.set_quick(i, read<I>(most + i) >> 23, p.bits);
    else
      for (int i = 0; i < CHUNK; i++) factors.set(scales, i, exponent[i]);
    return ordinary;
  }

  void rows(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    int64_t block = begin / tasks.strips, strip = begin % tasks.strips;
    ColumnFactors<STOCHASTIC> factors[BATCH];
    bool ordinary[BATCH];
    alignas(64) int32_t most[BATCH * CHUNK];
    uint8_t exponent[BATCH * CHUNK];
    while (begin < end) {
      int64_t run = tasks.strips - strip < end - begin ? tasks.strips - strip : end - begin;
      if (run > BATCH) run = BATCH;
      const int64_t outer = block / tasks.per_outer, box = block % tasks.per_outer, column = strip * CHUNK;
      const int64_t top = outer * p.rows + box * p.box, last = (outer + 1) * p.rows;
      const int64_t bottom = top + p.box < last ? top + p.box : last;
      const int n = (int)(p.columns - column < run * CHUNK ? p.columns - column : run * CHUNK);
      largest_of_columns(top, bottom, column, n, most);
      for (int i = 0; i < run * CHUNK; i++) exponent[i] = (uint8_t)(most[i] >> 23);
      if (job.exponents) memcpy(job.exponents + block * p.columns + column, exponent, (size_t)n);
      for (int c = 0; c < run; c++) ordinary[c] = set_factors(most + c * CHUNK, exponent + c * CHUNK, factors[c]);
      const int64_t ahead = strip + run < tasks.strips ? run * CHUNK : p.box * p.columns - column;
      for (int64_t row = top; row < bottom; row++) {
        // the processor foresees steps along a row, but not the step to the next rows: ask for them meanwhile
        for (int i = 0; i < n; i += 64 / (int)sizeof(In)) __builtin_prefetch(values(row, column) + ahead + i, 0, 2);
        if (STOCHASTIC)
          for (int c = 0; c < run; c++) random.draw(c, row, strip + c);
        for (int c = 0; c < run; c++) {
          if (ordinary[c]) under_columns<true>(row, column + c * CHUNK, factors[c], c);
          else under_columns<false>(row, column + c * CHUNK, factors[c], c);
        }
      }
      begin += run, strip += run;
      if (strip == tasks.strips) strip = 0, block++;
    }
  }
};

// ---- back ----

template <class Out> struct Decoder {
  const Job& job;
  const Plan& p = *job.plan;
  const Scales& scales = *job.scales;
  const Unpacker unpacker{p.bits};
  const Values<Out> sink{job};
  const uint8_t* codes_end = job.codes + p.outer * p.rows * p.row_bytes;

  // n columns from (row, column), under factors(column of the chunk).
  template <class GetFactors> INLINE void under(int64_t row, int64_t column, int n, GetFactors factors) const {
    const uint8_t* in = job.codes + row * p.row_bytes + column / 8 * p.bits;
    uint8_t few[CHUNK * 2 + 16];
    if (codes_end - in < 16 * p.bits + 16) {  // the unpacker reads beyond
      const size_t bytes = (size_t)(codes_end - in);
      memcpy(few, in, bytes);
      memset(few + bytes, 0, sizeof few - bytes);
      in = few;
    }
    each_step((const Out*)nullptr, n, sink, row, column, [&](const Out*, Out* to, int i, bool whole) ALWAYS {
      I code[UNITS];
      unpacker.step(in + i / 8 * p.bits, code);
      sink.put(code, [&](int c) ALWAYS { return factors(i + c); }, to, whole);
    });
  }

  // Boxes along the columns, or one for the tensor.
  void columns(int64_t begin, int64_t end) const {
    const Tasks tasks = encode_tasks(p);
    const int64_t boxes = p.box ? ceil_div(p.columns, p.box) : 0;
    int64_t row = begin / tasks.strips, strip = begin % tasks.strips;
    ColumnFactors<false> by_column;
    uint8_t group[CHUNK / 16];
    memset(group, job.tensor_exponent, sizeof group);
    auto factors_of_group = [&](int c) ALWAYS { return group_factors<false>(scales, group[c / 16]); };
    for (int64_t task = begin; task < end; task++) {
      const int64_t first = strip * tasks.width;
      const int64_t last = first + tasks.width < p.columns ? first + tasks.width : p.columns;
      const uint8_t* exponent = job.exponents + row * boxes;
      for (int64_t column = first; column < last; column += CHUNK) {
        const int n = (int)(last - column < CHUNK ? last - column : CHUNK);
        if (p.box % 16 == 0) {
          if (p.box == 16 && n == CHUNK) memcpy(group, exponent + column / 16, CHUNK / 16);
          else if (p.box) for (int g = 0; 16 * g < n; g++) group[g] = exponent[(column + 16 * g) / p.box];
          under(row, column, n, factors_of_group);
        } else {
          for (int i = 0; i < n; i++) by_column.set(scales, i, exponent[(column + i) / p.box]);
          under(row, column, n, [&](int c) ALWAYS { return by_column.at(c); });
        }
      }
      if (++strip == tasks.strips) strip = 0, row++;
    }
  }

  void rows(int64_t begin, int64_t end) const {
    const Tasks tasks = encode_tasks(p);
    int64_t block = begin / tasks.strips, strip = begin % tasks.strips;
    ColumnFactors<false> by_column;
    for (int64_t task = begin; task < end; task++) {
      const int64_t outer = block / tasks.per_outer, box = block % tasks.per_outer, column = strip * CHUNK;
      const int64_t top = outer * p.rows + box * p.box, last = (outer + 1) * p.rows;
      const int64_t bottom = top + p.box < last ? top + p.box : last;
      const int n = (int)(p.columns - column < CHUNK ? p.columns - column : CHUNK);
      for (int i = 0; i < n; i++) by_column.set(scales, i, job.exponents[block * p.columns + column + i]);
      for (int64_t row = top; row < bottom; row++)
        under(row, column, n, [&](int c) ALWAYS { return by_column.at(c); });
      if (++strip == tasks.strips) strip = 0, block++;
    }
  }
};

// ---- the entries of the table ----

template <class In> uint32_t largest(const Job& job, int64_t begin, int64_t end) {
  const In* x = (const In*)job.values;
  I most[4] = {};
  for (; begin + STEP <= end; begin += STEP) {
    F value[UNITS];
    load_step(x + begin, value);
#pragma GCC unroll 16
    for (int u = 0; u < UNITS; u++) most[u % 4] = max_of(most[u % 4], magnitude_bits(value[u]));
  }
  for (; begin < end; begin++) {
    In few[LANES] = {x[begin]};
    most[0] = max_of(most[0], magnitude_bits(load(few)));
  }
  return largest_lane(max_of(max_of(most[0], most[1]), max_of(most[2], most[3])));
}

template <class Sink, class In> void encode_into(const Job& job, int64_t begin, int64_t end) {
  const bool rows = boxes_along_rows(*job.plan);
  if (job.plan->stochastic) {
    Encoder<true, In, Sink> encoder{job};
    rows ? encoder.rows(begin, end) : encoder.columns(begin, end);
  } else {
    Encoder<false, In, Sink> encoder{job};
    rows ? encoder.rows(begin, end) : encoder.columns(begin, end);
  }
  end_of_streams();
}

template <class Out> void decode(const Job& job, int64_t begin, int64_t end) {
  const Decoder<Out> decoder{job};
  boxes_along_rows(*job.plan) ? decoder.rows(begin, end) : decoder.columns(begin, end);
  end_of_streams();
}

template <class Sink> void encode_from(const Job& job, int64_t begin, int64_t end) {
  switch (job.plan->dtype) {
    case FLOAT32: return encode_into<Sink, float>(job, begin, end);
    case BFLOAT16: return encode_into<Sink, bf16>(job, begin, end);
    case FLOAT16: return encode_into<Sink, half>(job, begin, end);
  }
}

uint32_t largest_any(const Job& job, int64_t begin, int64_t end) {
  switch (job.plan->dtype) {
    case BFLOAT16: return largest<bf16>(job, begin, end);
    case FLOAT16: return largest<half>(job, begin, end);
    default: return largest<float>(job, begin, end);
  }
}

void quantize(const Job& job, int64_t begin, int64_t end) {
  switch (job.plan->out_dtype) {
    case FLOAT32: return encode_from<Values<float>>(job, begin, end);
    case BFLOAT16: return encode_from<Values<bf16>>(job, begin, end);
    case FLOAT16: return encode_from<Values<half>>(job, begin, end);
  }
}

void pack(const Job& job, int64_t begin, int64_t end) {
  switch (job.plan->bits) {
    case 2: return encode_from<Codes<2>>(job, begin, end);
    case 4: return encode_from<Codes<4>>(job, begin, end);
    case 8: return encode_from<Codes<8>>(job, begin, end);
    case 16: return encode_from<Codes<16>>(job, begin, end);
    default: return encode_from<Codes<0>>(job, begin, end);
  }
}

void unpack(const Job& job, int64_t begin, int64_t end) {
  switch (job.plan->dtype) {
    case FLOAT32: return decode<float>(job, begin, end);
    case BFLOAT16: return decode<bf16>(job, begin, end);
    case FLOAT16: return decode<half>(job, begin, end);
  }
}

}  // namespace
