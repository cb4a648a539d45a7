// Quantising and packing: exponents, then codes or values on the grid, then where they go (a Sink).
//
// Work goes a STEP of columns at a time, through stages over a batch of steps. Steps that are whole and have ordinary
// exponents go the quick way; the others through copies filled up with zeros, which alter neither a largest value nor a
// code.
#pragma once

#include "bits.h"
#include "rounding.h"

namespace {

// ---- where a step goes ----

struct Values {
  static constexpr bool VALUES = true;
  uint8_t* out;
  int64_t columns;
  int32_t dtype;
  bool past_caches, asks, exact;

  explicit Values(const Job& job)
      : out((uint8_t*)job.out), columns(job.plan->columns), dtype(job.plan->out_dtype), past_caches(job.stream),
        asks(job.ask), exact(job.plan->bits <= 9) {}
  uint8_t* place(int64_t row, int64_t column) const { return out + (row * columns + column) * size_of(dtype); }
  size_t size(int n) const { return (size_t)(n * size_of(dtype)); }
  int64_t row_stride() const { return columns * size_of(dtype); }
  int step_stride() const { return STEP * size_of(dtype); }
  // `ordinary` values are normal numbers
  INLINE void put(const F value[UNITS], uint8_t* to, bool ordinary) const {
    store_step(to, dtype, value, ordinary && past_caches, exact && ordinary);
  }
  // The step `bytes` after `to` is soon to be written.
  INLINE void ask(const uint8_t* to, int bytes) const {
    if (asks) ask_for<3, true>((uintptr_t)to + bytes, step_stride());
  }
};

struct Codes {
  static constexpr bool VALUES = false;
  uint8_t* out;
  int64_t row_bytes;
  int bits;

  explicit Codes(const Job& job) : out(job.codes), row_bytes(job.plan->row_bytes), bits(job.plan->bits) {}
  uint8_t* place(int64_t row, int64_t column) const { return out + row * row_bytes + column / 8 * bits; }
  size_t size(int n) const { return (size_t)ceil_div(n * bits, 8); }
  int64_t row_stride() const { return row_bytes; }
  int step_stride() const { return STEP / 8 * bits; }
  INLINE void ask(const uint8_t*, int) const {}  // few lines
  INLINE void put(const I code[UNITS], uint8_t* to) const {
    switch (bits) {
      case 2: return pack_step<2>(code, bits, to);
      case 4: return pack_step<4>(code, bits, to);
      case 8: return pack_step<8>(code, bits, to);
      case 16: return pack_step<16>(code, bits, to);
      default: return pack_step<0>(code, bits, to);
    }
  }
};

// A whole step under ordinary exponents.
template <bool STOCHASTIC, class Sink, class GetFactors>
INLINE void ordinary_step(const uint8_t* from, int32_t dtype, GetFactors factors, F max_code, const Numbers& numbers,
                          const Sink& sink, uint8_t* to) {
  F x[UNITS];
  load_step(from, dtype, x);
  if constexpr (Sink::VALUES && !STOCHASTIC) {
    EACH_UNIT(u) {
      const Factors f = factors(u);
      x[u] = to_grid(x[u], f.up_or_shift, f.step_or_most);
    }
    sink.put(x, to, true);
  } else {
    I code[UNITS];
    EACH_UNIT(u) code[u] = round_to_code<STOCHASTIC>(x[u] * factors(u).up_or_shift, max_code, numbers, u);
    if constexpr (Sink::VALUES) {
      EACH_UNIT(u) x[u] = value_of(code[u], factors(u).step_or_most);
      sink.put(x, to, true);
    } else {
      sink.put(code, to);
    }
  }
}

// Hot loops work on copies of members: the compiler must take any byte they write for a member's.
template <bool STOCHASTIC, class Sink> struct Encoder {
  static constexpr bool VALUES = Sink::VALUES;
  const Job& job;
  const Plan& p = *job.plan;
  const int item = size_of(p.dtype);
  const F max_code = splat((float)((1 << (p.bits - 1)) - 1));
  const int least = least_ordinary(p.bits, STOCHASTIC);
  const Sink sink{job};
  Random random{job.seed};
  int64_t begun = -1;  // the block that random.starts begins with

  const uint8_t* values(int64_t row, int64_t column) const {
    return (const uint8_t*)job.values + (row * p.columns + column) * item;
  }

  // Values that are soon to be read are asked for. To draw random numbers takes much of the time, so the first half of
  // each step is asked for then, and the second when another is rounded. Rounding to nearest asks for all of it.
  INLINE void ask_while_drawing(uintptr_t chunk) const {
    for (int s = 0; s < CHUNK / STEP; s++) ask_for<2>(chunk + s * STEP * item, STEP * item / 2);
  }
  INLINE void ask_while_rounding(uintptr_t step) const {
    const int asked = STOCHASTIC ? STEP * item / 2 : 0;
    ask_for<2>(step + asked, STEP * item - asked);
  }

  INLINE void load_columns(const uint8_t* x, int n, F value[UNITS]) const {
    alignas(64) uint8_t few[STEP * 4];
    if (n < STEP) {
      memset(few, 0, sizeof few);
      x = (const uint8_t*)memcpy(few, x, (size_t)(n * item));
    }
    load_step(x, p.dtype, value);
  }

  // A step of n columns under any exponents, one for each column.
  __attribute__((noinline)) void any_step(const uint8_t* from, int n, const uint8_t exponent[STEP],
                                          const Numbers& numbers, uint8_t* to) const {
    F x[UNITS];
    I code[UNITS];
    load_columns(from, n, x);
    EACH_UNIT(u) {
      const AnyFactors f(widened(exponent + u * LANES), p.bits);
      const F t = x[u] * f.up * f.up_more * splat((float)(1 << FRACTION_BITS<STOCHASTIC>));
      code[u] = round_to_code<STOCHASTIC>(t, max_code, numbers, u);
      if constexpr (VALUES) x[u] = value_of(code[u], f.down) * f.down_more;
      else code[u] &= t == t;
    }
    alignas(64) uint8_t waiting[STEP * 4];
    if constexpr (VALUES) sink.put(x, waiting, false);
    else sink.put(code, waiting);
    memcpy(to, waiting, sink.size(n < STEP ? n : STEP));
  }

  // ---- boxes along the columns ----

  // n columns from (row, column) on, at most WIDE. Boxes of 16 find their exponents here; else exponent[i / box] is
  // that of column - skipped + i.
  void batch(int64_t row, int64_t column, int n, const uint8_t* exponent, int64_t skipped) {
    const int steps = (n + STEP - 1) / STEP, step_bytes = STEP * item;
    const int32_t dtype = p.dtype;
    const bool in_groups = p.box % 16 == 0, far = job.far;
    const uint8_t* x = values(row, column);
    uint32_t four[WIDE / STEP];  // a group's exponent in each byte
    uint8_t* const group = (uint8_t*)four;
    if (p.box == 16) {
      for (int i = 0; i < steps; i++) {
        F value[UNITS];
        if (far && !STOCHASTIC) ask_for<2>((uintptr_t)(x + i * step_bytes) + PAGE, step_bytes);
        load_columns(x + i * step_bytes, n - i * STEP, value);
        four[i] = exponents_of(value);
      }
    } else if (in_groups) {
      memset(group, job.tensor_exponent, sizeof four);
      for (int g = 0; p.box && 16 * g < n; g++) group[g] = exponent[(skipped + 16 * g) / p.box];
    }
    for (int i = n / STEP; i < WIDE / STEP; i++) four[i] = i < steps ? four[i] : four[0];
    FactorsOfGroups<STOCHASTIC, VALUES> factors;
    factors.set(group, p.bits, least);
    if (STOCHASTIC) {
      if (begun != column / CHUNK) {
        begun = column / CHUNK;
        for (int c = 0; c < WIDE / CHUNK; c++) random.begin(c, begun + c);
      }
      for (int c = 0; c * CHUNK < n; c++) {
        if (far) ask_while_drawing((uintptr_t)(x + c * CHUNK * item) + PAGE);
        random.draw(c, c, row);
      }
    }

    const Sink out = sink;
    const F most = max_code;
    uint8_t* to = out.place(row, column);
    for (int64_t i = 0; i < steps; i++, x += step_bytes, to += out.step_stride()) {
      const int at = (int)i * STEP;
      const Numbers& numbers = random.drawn[at / CHUNK][at % CHUNK / STEP];
      if (in_groups && n - at >= STEP && (factors.ordinary || all_ordinary(four[i], least))) {
        auto factors_of = [&](int u) ALWAYS { return factors.of(i * STEP / 16, u); };
        out.ask(to, PAGE);
        if (STOCHASTIC && far) ask_while_rounding((uintptr_t)x + PAGE);
        ordinary_step<STOCHASTIC>(x, dtype, factors_of, most, numbers, out, to);
      } else {
        uint8_t each[STEP] = {};
        if (in_groups) each_of_groups(group + at / 16, each);
        else for (int c = 0; c < STEP && at + c < n; c++) each[c] = exponent[(skipped + at + c) / p.box];
        any_step(x, n - at, each, numbers, to);
      }
    }
    if (p.box == 16 && job.exponents) {
      uint8_t* const exponents = job.exponents + row * ceil_div(p.columns, 16) + column / 16;
      if (n == WIDE) memcpy(exponents, four, sizeof four);
      else memcpy(exponents, four, (size_t)ceil_div(n, 16));
    }
  }

  // The exponents of boxes of any size along the columns first..last - 1, which hold whole boxes.
  void find_exponents(int64_t row, int64_t first, int64_t last, uint8_t exponent[CHUNK]) const {
    memset(exponent, 0, CHUNK);
    for (int64_t column = first; column < last; column += STEP) {
      const int n = (int)(last - column < STEP ? last - column : STEP);
      F value[UNITS];
      alignas(64) int32_t magnitude[STEP];
      load_columns(values(row, column), n, value);
      EACH_UNIT(u) write(magnitude + u * LANES, magnitude_bits(value[u]) >> 23);
      for (int i = 0; i < n; i++) {
        uint8_t& e = exponent[(column - first + i) / p.box];
        e = magnitude[i] > e ? (uint8_t)magnitude[i] : e;
      }
    }
  }

  void columns(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    const bool own_exponents = p.box != 0 && p.box != 16;
    uint8_t exponent[CHUNK];
    int64_t row = begin / tasks.strips, strip = begin % tasks.strips;
    while (begin < end) {
      const int64_t first = strip * tasks.width;
      const int64_t run = own_exponents ? 1 : tasks.strips - strip < end - begin ? tasks.strips - strip : end - begin;
      const int64_t last = first + run * tasks.width < p.columns ? first + run * tasks.width : p.columns;
      if (own_exponents) {
        find_exponents(row, first, last, exponent);
        if (job.exponents)
          memcpy(job.exponents + row * ceil_div(p.columns, p.box) + first / p.box, exponent,
                 (size_t)ceil_div(last - first, p.box));
      }
      for (int64_t column = first; column < last; column += WIDE)
        batch(row, column, (int)(last - column < WIDE ? last - column : WIDE), exponent, column - first);
      begin += run, strip += run;
      if (strip == tasks.strips) strip = 0, row++;
    }
  }

  // ---- boxes along the rows ----

  // The largest stored exponent of each of n columns from `column`, over rows top..bottom - 1. A few rows at a time are
  // read as far as they go, which is how memory is fastest.
  void largest_of_columns(int64_t top, int64_t bottom, int64_t column, int n, int32_t exponent[WIDE]) const {
    constexpr int together = 4;
    const int64_t stride = p.columns * item;
    for (int64_t row = top; row < bottom; row += together) {
      const int rows = (int)(bottom - row < together ? bottom - row : together);
      for (int i = 0; i < n; i += STEP) {
        I most[UNITS];
        EACH_UNIT(u) most[u] = row == top ? I{} : read<I>(exponent + i + u * LANES);
        const uint8_t* x = values(row, column + i);
        for (int r = 0; r < rows; r++, x += stride) {
          F value[UNITS];
          load_columns(x, n - i, value);
          EACH_UNIT(u) most[u] = max_of(most[u], magnitude_bits(value[u]));
        }
        EACH_UNIT(u) write(exponent + i + u * LANES, row + together < bottom ? most[u] : most[u] >> 23);
      }
    }
  }

  // A step of n columns of rows top..bottom - 1; asks for the values `ahead` meanwhile.
  void rows_of_step(int64_t top, int64_t bottom, int64_t column, int n, const int32_t exponent[STEP],
                    int64_t ahead) const {
    I unusual = {};
    Factors factors[UNITS];
    EACH_UNIT(u) {
      const I e = read<I>(exponent + u * LANES);
      unusual |= not_ordinary(e, least);
      ordinary_factors<STOCHASTIC, VALUES>(e, p.bits, factors[u].up_or_shift, factors[u].step_or_most);
    }
    const Sink out = sink;
    const F most = max_code;
    const int32_t dtype = p.dtype;
    const int64_t stride = p.columns * item, ahead_bytes = ahead * item;
    const int rows = (int)(bottom - top), half = (int)(column % CHUNK / STEP);
    const uint8_t* x = values(top, column);
    uint8_t* to = out.place(top, column);
    if (n >= STEP && !any(unusual)) {
      for (int r = 0; r < rows; r++, x += stride, to += out.row_stride()) {
        ask_while_rounding((uintptr_t)x + ahead_bytes);
        out.ask(to, out.step_stride());
        auto factors_of = [&](int u) ALWAYS { return factors[u]; };
        ordinary_step<STOCHASTIC>(x, dtype, factors_of, most, random.drawn[r][half], out, to);
      }
    } else {
      uint8_t each[STEP];
      for (int c = 0; c < STEP; c++) each[c] = (uint8_t)exponent[c];
      for (int r = 0; r < rows; r++, x += stride, to += out.row_stride())
        any_step(x, n, each, random.drawn[r][half], to);
    }
  }

  void rows(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    alignas(64) int32_t exponent[WIDE];
    while (begin < end) {
      const int64_t block = begin / tasks.strips, strip = begin % tasks.strips, column = strip * CHUNK;
      int64_t run = tasks.strips - strip < end - begin ? tasks.strips - strip : end - begin;
      if (run > BATCH) run = BATCH;
      const int64_t outer = block / tasks.per_outer, box = block % tasks.per_outer;
      const int64_t top = outer * p.rows + box * p.box, last = (outer + 1) * p.rows;
      const int64_t bottom = top + p.box < last ? top + p.box : last;
      const int n = (int)(p.columns - column < run * CHUNK ? p.columns - column : run * CHUNK);
      largest_of_columns(top, bottom, column, n, exponent);
      if (job.exponents) {
        uint8_t* to = job.exponents + block * p.columns + column;
        for (int i = 0; i < n; i++) to[i] = (uint8_t)exponent[i];
      }
      // the processor foresees steps along a row, but not the step to the next rows
      const int64_t ahead = strip + run < tasks.strips ? run * CHUNK : p.box * p.columns - column;
      for (int c = 0; c < n; c += CHUNK) {
        if (STOCHASTIC) random.begin(0, strip + c / CHUNK);
        for (int64_t row = top; row < bottom; row += SLOTS) {
          const int64_t until = row + SLOTS < bottom ? row + SLOTS : bottom;
          if (STOCHASTIC)
            for (int64_t r = row; r < until; r++) {
              ask_while_drawing((uintptr_t)values(r, column + c + ahead));
              random.draw((int)(r - row), 0, r);
            }
          for (int i = c; i < n && i < c + CHUNK; i += STEP)
            rows_of_step(row, until, column + i, n - i, exponent + i, ahead);
        }
      }
      begin += run;
    }
  }
};

}  // namespace
