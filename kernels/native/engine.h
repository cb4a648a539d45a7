// The kernels of one instruction set: a file defines LANES and ISA and includes this.
//
// Work goes CHUNK columns of a row at a time: the exponents of its boxes first, then its codes, then where they go
// (a Sink): back to values, or into bits. Boxes along the rows do the same for a box's rows one after another, under
// one set of exponents.
#pragma once

#include "bits.h"
#include "random.h"

namespace {

// What takes LANES values to codes and back.
struct Factors {
  F up, more, down;
};

// A factor for each column of a chunk, where the boxes give no better.
struct ColumnFactors {
  alignas(64) float up[CHUNK], more[CHUNK], down[CHUNK];

  void set(const Scales& s, int column, uint8_t exponent) {
    up[column] = s.up[exponent], more[column] = s.up_more[exponent], down[column] = s.down[exponent];
  }
  Factors operator()(int column) const {
    return {load(up + column), load(more + column), load(down + column)};
  }
};

// One exponent for each 16 columns.
struct GroupFactors {
  const Scales& s;
  uint8_t exponent[CHUNK / 16];

  Factors operator()(int column) const {
    uint8_t e = exponent[column / 16];
    return {splat(s.up[e]), splat(s.up_more[e]), splat(s.down[e])};
  }
};

template <bool STOCHASTIC> inline I round_to_code(F x, const Factors& f, F max_code, const Random& random, int column) {
  F t = x * f.up * f.more;
  if constexpr (!STOCHASTIC) {
    const F shift = splat(0x1.8p23f);  // adding it leaves the rounded number in the low bits
    return (I)(clamp(t, max_code) + shift) - (I)shift;
  } else {
    F a = clamp((F)magnitude_bits(t), max_code);
    I whole = __builtin_convertvector(a, I);
    F fraction = (a - __builtin_convertvector(whole, F)) * splat(0x1p16f);
    F uniform = __builtin_convertvector((I)random.at(column), F) + splat(0.5f);
    whole -= uniform < fraction;
    I sign = (I)x >> 31;
    return (whole ^ sign) - sign;
  }
}

// ---- where codes go ----

template <class Out> class Values {
 public:
  Values(const Job& job) : out_((Out*)job.out), columns_(job.plan->columns), stream_(job.stream) {}

  void start(int64_t row, int64_t column, int n) {
    target_ = out_ + row * columns_ + column;
    n_ = n;
    whole_ = n == CHUNK;
  }
  void put(int i, I code, const Factors& f) {
    F value = __builtin_convertvector(code, F) * f.down;
    if (!whole_) store(waiting_ + i, value);
    else if (stream_) stream(target_ + i, value);
    else store(target_ + i, value);
  }
  void finish() {
    if (!whole_) memcpy(target_, waiting_, (size_t)n_ * sizeof(Out));
  }

 private:
  Out *out_, *target_;
  int64_t columns_;
  bool stream_, whole_;
  int n_;
  alignas(64) Out waiting_[CHUNK];
};

template <int WIDTH> class Codes {
 public:
  Codes(const Job& job) : out_(job.codes), row_bytes_(job.plan->row_bytes), bits_(job.plan->bits) {}

  void start(int64_t row, int64_t column, int n) {
    target_ = out_ + row * row_bytes_ + column / 8 * bits_;
    n_ = n;
  }
  void put(int i, I code, const Factors& f) { store_code(waiting_ + i, code & (f.down == f.down)); }  // NaN: code 0
  void finish() {
    if (WIDTH && n_ == CHUNK) return pack_chunk<WIDTH>(waiting_, bits_, target_);
    for (int i = ceil_div(n_, 16) * 16; i < CHUNK; i++) waiting_[i] = 0;
    uint8_t bytes[CHUNK * 2 + 16];
    pack_chunk<WIDTH>(waiting_, bits_, bytes);
    memcpy(target_, bytes, (size_t)ceil_div(n_ * bits_, 8));
  }

 private:
  uint8_t *out_, *target_;
  int64_t row_bytes_;
  int bits_, n_;
  alignas(64) typename Waiting<WIDTH>::type waiting_[CHUNK];
};

// ---- a chunk of a row ----

// Calls work(values, n) with n a multiple of 16: on the values themselves, or, where fewer than a chunk are left, on a
// float copy filled up with zeros, which alter neither a largest value nor a code.
template <class In, class Work> inline void on_chunk(const In* x, int n, Work work) {
  if (n == CHUNK) return work(x, CHUNK);
  alignas(64) In few[CHUNK] = {};
  memcpy(few, x, (size_t)n * sizeof(In));
  work((const In*)few, (int)ceil_div(n, 16) * 16);
}

template <bool STOCHASTIC, class In, class GetFactors, class Sink>
inline void encode(const In* x, int n, const GetFactors& factors, F max_code, const Random& random, Sink& sink) {
  for (int i = 0; i < n; i += LANES) {
    Factors f = factors(i);
    sink.put(i, round_to_code<STOCHASTIC>(load(x + i), f, max_code, random, i), f);
  }
}

// The largest stored exponent of each 16 columns; beyond n, of nothing.
template <class In> inline void group_exponents(const In* x, int n, uint8_t exponent[CHUNK / 16]) {
  I most[CHUNK / 16] = {};
  for (int i = 0; i < n; i += LANES) most[i / 16] = max_of(most[i / 16], magnitude_bits(load(x + i)));
  for (int g = 0; g < CHUNK / 16; g += 4) {
    uint32_t four = four_exponents(most[g], most[g + 1], most[g + 2], most[g + 3]);
    memcpy(exponent + g, &four, 4);
  }
}

// ---- boxes along the columns ----

template <bool STOCHASTIC, class In, class Sink> void encode_columns(const Job& job, int64_t begin, int64_t end) {
  const Plan& p = *job.plan;
  const Tasks tasks = encode_tasks(p);
  const F max_code = splat((float)((1 << (p.bits - 1)) - 1));
  const int64_t boxes = p.box ? ceil_div(p.columns, p.box) : 0;
  const bool grouped = p.box % 16 == 0;
  Random random{job.seed, {}};
  Sink sink(job);
  ColumnFactors by_column;
  uint8_t exponent[CHUNK];  // of the strip's boxes
  for (int64_t task = begin; task < end; task++) {
    const int64_t row = task / tasks.strips, first = task % tasks.strips * tasks.width;
    const int64_t last = first + tasks.width < p.columns ? first + tasks.width : p.columns;
    const In* x = (const In*)job.values + row * p.columns;
    uint8_t group[CHUNK / 16];
    if (p.box == 0) {
      memset(group, job.tensor_exponent, sizeof group);
    } else {
      const int64_t count = ceil_div(last - first, p.box);
      memset(exponent, 0, sizeof exponent);
      for (int64_t column = first; column < last; column += CHUNK) {
        const int left = (int)(last - column < CHUNK ? last - column : CHUNK);
        on_chunk(x + column, left, [&](const In* values, int n) {
          if (grouped) {
            group_exponents(values, n, group);
            if (p.box == 16) {
              memcpy(exponent, group, sizeof group);
              return;
            }
            for (int g = 0; g < n / 16; g++) {
              uint8_t& e = exponent[(column - first + 16 * g) / p.box];
              e = group[g] > e ? group[g] : e;
            }
          } else {
            int32_t magnitude[CHUNK];
            for (int i = 0; i < n; i += LANES) write(magnitude + i, magnitude_bits(load(values + i)) >> 23);
            for (int i = 0; i < left; i++) {
              uint8_t& e = exponent[(column - first + i) / p.box];
              e = magnitude[i] > e ? (uint8_t)magnitude[i] : e;
            }
          }
        });
      }
      if (job.exponents) memcpy(job.exponents + row * boxes + first / p.box, exponent, (size_t)count);
    }
    for (int64_t column = first; column < last; column += CHUNK) {
      const int left = (int)(last - column < CHUNK ? last - column : CHUNK);
      if (STOCHASTIC) random.draw(row, column / CHUNK);
      sink.start(row, column, left);
      on_chunk(x + column, left, [&](const In* values, int n) {
        if (!grouped) {
          for (int i = 0; i < left; i++) by_column.set(*job.scales, i, exponent[(column - first + i) / p.box]);
          for (int i = left; i < n; i++) by_column.set(*job.scales, i, 0);
          encode<STOCHASTIC>(values, n, by_column, max_code, random, sink);
          return;
        }
        GroupFactors by_group{*job.scales, {}};
        if (p.box == 16) memcpy(by_group.exponent, exponent, sizeof group);
        else if (p.box == 0) memcpy(by_group.exponent, group, sizeof group);
        else for (int g = 0; g < n / 16; g++) by_group.exponent[g] = exponent[(column - first + 16 * g) / p.box];
        encode<STOCHASTIC>(values, n, by_group, max_code, random, sink);
      });
      sink.finish();
    }
  }
}

// ---- boxes along the rows ----

template <bool STOCHASTIC, class In, class Sink> void encode_rows(const Job& job, int64_t begin, int64_t end) {
  const Plan& p = *job.plan;
  const Tasks tasks = encode_tasks(p);
  const F max_code = splat((float)((1 << (p.bits - 1)) - 1));
  Random random{job.seed, {}};
  Sink sink(job);
  ColumnFactors factors;
  for (int64_t task = begin; task < end; task++) {
    const int64_t block = task / tasks.strips, column = task % tasks.strips * CHUNK;
    const int64_t outer = block / tasks.per_outer, box = block % tasks.per_outer;
    const int64_t top = outer * p.rows + box * p.box;
    const int64_t bottom = outer * p.rows + (box * p.box + p.box < p.rows ? box * p.box + p.box : p.rows);
    const int left = (int)(p.columns - column < CHUNK ? p.columns - column : CHUNK);
    const In* x = (const In*)job.values + column;

    alignas(64) int32_t most[CHUNK] = {};
    for (int64_t row = top; row < bottom; row++)
      on_chunk(x + row * p.columns, left, [&](const In* values, int n) {
        for (int i = 0; i < n; i += LANES)
          write(most + i, max_of(read<I>(most + i), magnitude_bits(load(values + i))));
      });
    uint8_t exponent[CHUNK];
    for (int i = 0; i < CHUNK; i++) {
      exponent[i] = (uint8_t)(most[i] >> 23);
      factors.set(*job.scales, i, exponent[i]);
    }
    if (job.exponents) memcpy(job.exponents + block * p.columns + column, exponent, (size_t)left);

    for (int64_t row = top; row < bottom; row++) {
      if (STOCHASTIC) random.draw(row, column / CHUNK);
      sink.start(row, column, left);
      on_chunk(x + row * p.columns, left, [&](const In* values, int n) {
        encode<STOCHASTIC>(values, n, factors, max_code, random, sink);
      });
      sink.finish();
    }
  }
}

// ---- back ----

template <class Out> void decode(const Job& job, int64_t begin, int64_t end) {
  const Plan& p = *job.plan;
  const Tasks tasks = encode_tasks(p);
  const bool rows = boxes_along_rows(p), grouped = !rows && p.box % 16 == 0;
  const int64_t boxes = p.box ? ceil_div(p.columns, p.box) : 0;
  const uint8_t* codes_end = job.codes + p.outer * p.rows * p.row_bytes;
  const Unpacker unpacker(p.bits);
  Values<Out> sink(job);
  ColumnFactors by_column;
  GroupFactors by_group{*job.scales, {}};
  for (int64_t task = begin; task < end; task++) {
    const int64_t block = task / tasks.strips, first = task % tasks.strips * tasks.width;
    const int64_t last = first + tasks.width < p.columns ? first + tasks.width : p.columns;
    const int64_t outer = block / tasks.per_outer, box = block % tasks.per_outer;
    const int64_t top = outer * p.rows + box * tasks.height;
    const int64_t height = p.rows - box * tasks.height < tasks.height ? p.rows - box * tasks.height : tasks.height;
    for (int64_t column = first; column < last; column += CHUNK) {
      const int left = (int)(last - column < CHUNK ? last - column : CHUNK);
      const int n = (int)ceil_div(left, 16) * 16;
      const uint8_t* e = job.exponents + (rows ? block * p.columns + column : block * boxes);
      if (p.box == 0) memset(by_group.exponent, job.tensor_exponent, sizeof by_group.exponent);
      else if (grouped) for (int g = 0; g < n / 16; g++) by_group.exponent[g] = e[(column + 16 * g) / p.box];
      else for (int i = 0; i < n; i++)
        by_column.set(*job.scales, i, i >= left ? 0 : rows ? e[i] : e[(column + i) / p.box]);

      for (int64_t row = top; row < top + height; row++) {
        const uint8_t* in = job.codes + row * p.row_bytes + column / 8 * p.bits;
        uint8_t few[CHUNK * 2 + 16];
        if (codes_end - in < 16 * p.bits + 16) {  // the unpacker reads whole vectors
          const int64_t bytes = codes_end - in;
          memcpy(few, in, (size_t)bytes);
          memset(few + bytes, 0, sizeof few - (size_t)bytes);
          in = few;
        }
        sink.start(row, column, left);
        unpacker.each(in, n, [&](int i, I code) { sink.put(i, code, grouped ? by_group(i) : by_column(i)); });
        sink.finish();
      }
    }
  }
  end_of_streams();
}

// ---- the entries of the table ----

template <class In> uint32_t largest(const Job& job, int64_t begin, int64_t end) {
  I most = {};
  for (int64_t column = begin; column < end; column += CHUNK) {
    const int left = (int)(end - column < CHUNK ? end - column : CHUNK);
    on_chunk((const In*)job.values + column, left, [&](const In* values, int n) {
      for (int i = 0; i < n; i += LANES) most = max_of(most, magnitude_bits(load(values + i)));
    });
  }
  return largest_lane(most);
}

template <class Sink, class In> void encode_into(const Job& job, int64_t begin, int64_t end) {
  const bool rows = boxes_along_rows(*job.plan);
  if (job.plan->stochastic) (rows ? encode_rows<true, In, Sink> : encode_columns<true, In, Sink>)(job, begin, end);
  else (rows ? encode_rows<false, In, Sink> : encode_columns<false, In, Sink>)(job, begin, end);
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
