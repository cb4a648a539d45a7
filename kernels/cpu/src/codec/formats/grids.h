// Formats that are data (dsq.formats.GridFormat): quantizing, packing and unpacking. kernels/reference/grids.py defines
// every bit.
//
// A task is a row of blocks, as far as a few columns: first the largest magnitude of each unit, then the scales of the
// blocks, then all values. A unit is what has one factor: a group of 16 columns where blocks are of whole groups, else
// a column.
#pragma once

#include <stdlib.h>

#include "e4m3.h"
#include "../sinks.h"

namespace {

INLINE F nan_if(I mask, F x) { return (F)choose(mask, splat(0x7fc00000), (I)x); }

// 2^e, -127 <= e <= 127.
INLINE F power_of_two(I e) { return (F)choose(e == -127, splat(1 << 22), (e + 127) << 23); }

// The scales of blocks, by a rule, from the bits of their largest magnitudes.
struct ScaleRule {
  static constexpr float MOST = 0x1.fffffep127f;
  const GridDesc& g;
  const int top = (int)(bits_of(g.largest) >> 23) - 127;
  float of_tensor = 1, factor = 1;
  bool broken = false;  // the tensor is

  static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  }
  bool of_e4m3() const { return g.rule == E4M3_TE || g.rule == E4M3_CLAMPED; }

  ScaleRule(const GridDesc& desc, uint32_t largest) : g(desc) {
    if (!of_e4m3()) return;
    const float most = (float)(448 * (double)g.largest);
    broken = largest >= 0x7f800000;
    float amax = 1;
    if (!broken) memcpy(&amax, &largest, sizeof amax);
    const auto bounded = [](float x) { return x < MOST ? x : MOST; };
    if (g.rule == E4M3_TE) {
      const float encode = amax == 0 ? 1 : bounded(most / amax);
      of_tensor = 1 / encode;
      factor = encode * (float)(1 / (double)g.largest);
    } else {
      of_tensor = amax / most;
      if (of_tensor == 0) of_tensor = 1;
      factor = bounded(1 / of_tensor);
    }
  }
  float stored_of_tensor() const { return broken ? __builtin_nanf("") : of_tensor; }

  // What values are multiplied by, and what the scale is in memory, of blocks with these largest magnitudes.
  INLINE F up(I key, I& stored) const {
    const I nan = key >= 0x7f800000;
    if (of_e4m3()) {
      const F a = broken ? F{} : (F)key;
      const F size = g.rule == E4M3_TE ? a * factor : larger(a / g.largest / of_tensor, splat(0x1p-6f));
      stored = e4m3_of(smaller(size, splat(448.0f)));
      const F scale = value_of_e4m3(stored);
      const F inverse = g.rule == E4M3_TE ? splat(1.0f) / (scale * of_tensor) : factor / scale;
      return broken ? nan_if(I{} - 1, inverse) : smaller(inverse, splat(MOST));
    }
    const F a = (F)(key & ~nan);
    if (g.rule == FP32_AMAX) {
      F up = smaller(splat(g.largest) / a, splat(MOST));
      up = choose(key == 0, splat(1.0f), up);
      stored = (I)nan_if(nan, splat(1.0f) / up);
      return nan_if(nan, up);
    }
    I bits = g.rule == E8M0_RCEIL ? (I)(a / g.largest) : g.rule == E8M0_EVEN ? (I)a + (1 << (22 - g.digits)) : (I)a;
    I e = (bits >> 23) - 127;
    if (g.rule == E8M0_CEIL || g.rule == E8M0_RCEIL) e -= (bits & 0x7fffff) > choose(e == -127, splat(1 << 22), I{});
    if (g.rule != E8M0_RCEIL) e -= top;
    e = max_of(e, splat(-127));
    e = choose(e > 127, splat(127), e);
    stored = choose(nan, splat(255), e + 127);
    return nan_if(nan, power_of_two(-e));
  }

  // What elements are multiplied by.
  INLINE F down(I stored) const {
    if (of_e4m3()) return value_of_e4m3(stored) * stored_of_tensor();
    if (g.rule == FP32_AMAX) return (F)stored;
    return nan_if(stored == 255, power_of_two(stored - 127));
  }
};

// The columns of a task, in units.
template <bool GROUPED> struct Units {
  static constexpr int COLUMNS = GROUPED ? 16 : 1;
  const int64_t columns, count, padded, each, blocks;  // `each`: of a block

  Units(const GridDesc& g, int64_t columns)
      : columns(columns), count(ceil_div(columns, COLUMNS)), padded(ceil_div(columns, 4 * TILE) * 4 * TILE / COLUMNS),
        each(g.block_columns < columns ? g.block_columns / COLUMNS : count), blocks(ceil_div(count, each)) {}

  // Numbers of blocks, at the front, to the units of each; what is behind the last has the last's.
  template <class T> void spread(T* numbers) const {
    for (int64_t b = blocks; b-- > 0;) {
      const T number = numbers[b];
      const int64_t first = b * each, end = b == blocks - 1 ? padded : first + each;
      for (int64_t i = end; i-- > first;) numbers[i] = number;
    }
  }
  static INLINE F of(const float* factors, int64_t column, int v) {
    return GROUPED ? splat(factors[column / 16 + v * LANES / 16]) : read<F>(factors + column + v * LANES);
  }
  static INLINE I of(const int32_t* numbers, int64_t column, int v) { return (I)of((const float*)numbers, column, v); }
};

// The numbers of a task's units.
struct UnitNumbers {
  int32_t* key;   // bits of the largest magnitude
  float *up, *down;
  int32_t* pairs;  // of columns, where blocks run along the rows
  void* const memory;

  explicit UnitNumbers(int64_t columns) : memory(malloc((size_t)(4 * (columns + 4 * TILE)) * sizeof(float))) {
    const int64_t each = columns + 4 * TILE;
    key = (int32_t*)memory, up = (float*)memory + each, down = up + each, pairs = (int32_t*)(down + each);
  }
  ~UnitNumbers() { free(memory); }
  UnitNumbers(const UnitNumbers&) = delete;
};

// Where a task lies, and its blocks' scales among all.
struct Place {
  int64_t top, bottom, first, columns;
  int64_t scale, scale_stride;

  Place(const GridDesc& g, const GridTasks& tasks, int64_t task) {
    const CodecDesc& p = g.codec;
    const int64_t row = task / tasks.across, outer = row / tasks.down, down = row % tasks.down;
    const int64_t end = (outer + 1) * p.rows;
    first = task % tasks.across * tasks.width;
    columns = p.columns - first < tasks.width ? p.columns - first : tasks.width;
    top = outer * p.rows + down * g.block_rows;
    bottom = end - top < g.block_rows ? end : top + g.block_rows;
    const int64_t across = ceil_div(p.columns, g.block_columns), block = first / g.block_columns;
    scale = p.along_rows ? (outer * across + block) * tasks.down + down : row * across + block;
    scale_stride = p.along_rows ? tasks.down : 1;
    if (g.one_block) scale = scale_stride = 0;
  }
};

INLINE I neighbors(I x) {  // lanes swapped in pairs
  const U64 pairs = (U64)x;
  return (I)(pairs >> 32 | pairs << 32);
}

INLINE F with_sign_of(F x, F magnitude) { return (F)pick((U)x, (U)magnitude, 0x80000000); }

// Elements, as a place on the grid's magnitudes or as values.
struct Elements {
  const int digits;
  const F largest;
  const I lowest, shift;

  explicit Elements(const GridDesc& g)
      : digits(g.digits), largest(splat(g.largest)), lowest(I{} + ((g.lowest + 127) << 23)),
        shift(I{} + ((23 - g.digits) << 23 | 1 << 22)) {}

  // Rounds |t|: the whole number of steps, and the exponent that gives the step.
  template <bool STOCHASTIC, bool VALUE> INLINE I round(F t, const Numbers& numbers, int v) const {
    const F a = smaller(absolute(t), largest);  // as the largest lies on the grid, it may be clipped before
    const I e = max_of((I)a & 0x7f800000, lowest);
    if constexpr (!STOCHASTIC) {
      const F s = (F)(e + shift), rounded = a + s;  // the last bit of s is the step
      return VALUE ? (I)(rounded - s) : (I)rounded - (I)s + index_of(e);
    } else {
      const F k = a * (F)(((uint32_t)(254 + digits) << 23) - (U)e);  // wraps
      I whole = __builtin_convertvector(k, I);
      const F fraction = (k - __builtin_convertvector(whole, F)) * splat(0x1p16f);
      const F uniform = splat(65535.5f) - __builtin_convertvector((I)numbers.complement(v), F);
      whole -= uniform < fraction;
      return VALUE ? (I)(__builtin_convertvector(whole, F) * (F)(e - (digits << 23))) : whole + index_of(e);
    }
  }
  // How many magnitudes lie below the binade, beyond one binade's.
  INLINE I index_of(I e) const { return (e - lowest) >> (23 - digits); }

  // The value of a code.
  INLINE F value(I code, int bits) const {
    const I index = code & ((1 << (bits - 1)) - 1);
    const I binade = max_of(index >> digits, I{} + 1) - 1;
    const I k = index - (binade << digits);
    I e = binade + (lowest >> 23) - digits;  // a foreign code may lie beyond
    e = choose(e > 254, splat(254), e);
    const F magnitude = __builtin_convertvector(k, F) * (F)(e << 23);
    return with_sign_of((F)code, magnitude);
  }
};

template <bool STOCHASTIC, class Sink, bool GROUPED> struct GridEncoder {
  const GridJob& job;
  const GridDesc& g = *job.grid;
  const CodecDesc& p = g.codec;
  const int item = size_of(p.dtype);
  const ScaleRule rule{g, job.largest};
  const Elements elements{g};
  const Sink sink{job};
  Random random{job.seed};

  const uint8_t* values(int64_t row, int64_t column) const {
    return (const uint8_t*)job.values + (row * p.columns + column) * item;
  }

  INLINE void load_columns(int64_t row, int64_t column, int64_t n, F x[VECTORS]) const {
    const uint8_t* from = values(row, column);
    alignas(64) uint8_t few[TILE * 4];
    if (n < TILE) {
      memset(few, 0, sizeof few);
      from = (const uint8_t*)memcpy(few, from, (size_t)(n * item));
    }
    load_tile(from, p.dtype, x);
  }

  void find_keys(const Place& at, int32_t* key) const {
    for (int64_t i = 0; i < at.columns; i += 4 * TILE) {
      U groups[4] = {};
#pragma GCC unroll 4
      for (int t = 0; t < 4; t++) {
        const int64_t column = i + t * TILE;
        if (column >= at.columns) break;
        I most[VECTORS] = {};
        for (int64_t row = at.top; row < at.bottom; row++) {
          F x[VECTORS];
          load_columns(row, at.first + column, at.columns - column, x);
          EACH_VECTOR(v) most[v] = max_of(most[v], magnitude_bits(x[v]));
        }
        if constexpr (GROUPED) groups[t] = largest_of_groups(most);
        else EACH_VECTOR(v) write(key + column + v * LANES, most[v]);
      }
      if constexpr (GROUPED) largest_of_parts(groups, (uint32_t*)key + i / 16);
    }
  }

  static INLINE U largest_of_groups(const I most[VECTORS]) {
    constexpr int units = 16 / LANES;
    I group[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      group[i] = most[i * units];
#pragma GCC unroll 4
      for (int v = 1; v < units; v++) group[i] = max_of(group[i], most[i * units + v]);
    }
    return largest_lanes((U)group[0], (U)group[1], (U)group[2], (U)group[3]);
  }

  void set_factors(const Place& at, const Units<GROUPED>& units, UnitNumbers& numbers, bool stores) const {
    if (g.one_block) {
      for (int64_t b = 0; b < units.blocks; b++) numbers.key[b] = (int32_t)job.largest;
    } else if (units.each > 1) {
      for (int64_t b = 0; b < units.blocks; b++) {
        int32_t most = 0;
        for (int64_t i = b * units.each; i < units.count && i < (b + 1) * units.each; i++)
          most = numbers.key[i] > most ? numbers.key[i] : most;
        numbers.key[b] = most;
      }
    }
    for (int64_t b = 0; b < units.blocks; b += LANES) {
      I stored;
      write(numbers.up + b, rule.up(read<I>(numbers.key + b), stored));
      write(numbers.down + b, rule.down(stored));
      if (!stores || !job.exponents) continue;
      alignas(64) int32_t each[LANES];
      write(each, stored);
      for (int64_t i = 0; i < LANES && b + i < units.blocks; i++) store_scale(at.scale + (b + i) * at.scale_stride, each[i]);
    }
    units.spread(numbers.up);
    units.spread(numbers.down);
    if (g.pair) units.spread(numbers.key);
  }

  void store_scale(int64_t index, int32_t stored) const {
    if (g.rule == FP32_AMAX) memcpy(job.exponents + 4 * index, &stored, 4);
    else job.exponents[index] = (uint8_t)stored;
  }

  // Which values of a tile have half the step: those of a pair whose own exponent is below the block's.
  INLINE void find_low(const Place& at, const UnitNumbers& numbers, int64_t row, int64_t column, const F x[VECTORS],
                       I low[VECTORS]) const {
    F other[VECTORS] = {};
    if (p.along_rows) {
      const int64_t beside = at.top + ((row - at.top) ^ 1);
      if (beside < at.bottom) load_columns(beside, at.first + column, at.columns - column, other);
    }
    EACH_VECTOR(v) {
      const I own = magnitude_bits(x[v]);
      const I most = max_of(own, p.along_rows ? magnitude_bits(other[v]) : neighbors(own)) & 0x7f800000;
      low[v] = most < (Units<GROUPED>::of(numbers.key, column, v) & 0x7f800000);
    }
  }

  // The bits of a tile's pairs: a byte a block of 16; along the rows they wait in numbers.pairs.
  void keep_low(const Place& at, const UnitNumbers& numbers, int64_t row, int64_t column, const I low[VECTORS]) const {
    alignas(64) int32_t each[TILE];
    EACH_VECTOR(v) write(each + v * LANES, low[v]);
    if (p.along_rows) {
      for (int i = 0; i < TILE; i++) numbers.pairs[column + i] |= (each[i] & 1) << (row - at.top) / 2;
      return;
    }
    for (int group = 0; group < 4 && column + 16 * group < at.columns; group++) {
      int byte = 0;
      for (int i = 0; i < 8; i++) byte |= (each[16 * group + 2 * i] & 1) << i;
      job.pairs[at.scale + column / 16 + group] = (uint8_t)byte;
    }
  }

  void store_pairs_along_rows(const Place& at, const UnitNumbers& numbers) const {
    const int64_t rows = at.bottom - at.top;
    const int absent = 0xff & 0xff << (rows + 1) / 2;  // pairs of the zeros that fill a short block
    for (int64_t i = 0; i < at.columns; i++) {
      const int filled = numbers.key[i] >= 0x800000 ? absent : 0;
      job.pairs[at.scale + i * at.scale_stride] = (uint8_t)(numbers.pairs[i] | filled);
    }
  }

  INLINE void tile(const Place& at, const UnitNumbers& numbers, int64_t row, int64_t column, const Numbers& drawn,
                   const Sink& out) const {
    const int64_t n = at.columns - column;
    F x[VECTORS];
    I low[VECTORS];
    load_columns(row, at.first + column, n, x);
    if (g.pair) find_low(at, numbers, row, column, x, low);
    EACH_VECTOR(v) x[v] *= Units<GROUPED>::of(numbers.up, column, v);
    if (g.pair) {
      EACH_VECTOR(v) x[v] = choose(low[v], x[v] + x[v], x[v]);
      if (!Sink::VALUES && !(p.along_rows && (row - at.top) % 2)) keep_low(at, numbers, row, column, low);
    }
    if (g.prescale != 1) EACH_VECTOR(v) x[v] *= g.prescale;
    alignas(64) uint8_t waiting[TILE * 4];
    uint8_t* const to = out.place(row, at.first + column);
    if constexpr (Sink::VALUES) {
      EACH_VECTOR(v) x[v] = with_sign_of(x[v], (F)elements.template round<STOCHASTIC, true>(x[v], drawn, v));
      if (g.pair) EACH_VECTOR(v) x[v] = choose(low[v], x[v] * 0.5f, x[v]);
      EACH_VECTOR(v) x[v] *= Units<GROUPED>::of(numbers.down, column, v);
      if (g.prescale != 1) EACH_VECTOR(v) x[v] /= g.prescale;
      out.put(x, n < TILE ? waiting : to, n >= TILE);
    } else {
      I code[VECTORS];
      EACH_VECTOR(v) {
        code[v] = elements.template round<STOCHASTIC, false>(x[v], drawn, v) + (((I)x[v] >> 31) & -(1 << (p.bits - 1)));
        const F up = Units<GROUPED>::of(numbers.up, column, v);
        code[v] &= up == up;
      }
      out.put(code, n < TILE ? waiting : to);
    }
    if (n < TILE) memcpy(to, waiting, out.size((int)n));
  }

  void task(const Place& at, UnitNumbers& numbers, bool first) {
    const Units<GROUPED> units(g, at.columns);
    if (!g.one_block) find_keys(at, numbers.key);
    set_factors(at, units, numbers, first || !g.one_block);
    const bool pairs_along_rows = g.pair && p.along_rows && !Sink::VALUES;
    if (pairs_along_rows) memset(numbers.pairs, 0, (size_t)units.padded * sizeof *numbers.pairs);
    Sink out = sink;
    if constexpr (Sink::VALUES) out.exact = false;
    for (int64_t begin = 0; begin < at.columns; begin += BATCH_COLUMNS) {
      const int64_t end = at.columns - begin < BATCH_COLUMNS ? at.columns : begin + BATCH_COLUMNS;
      const int chunks = (int)ceil_div(end - begin, CHUNK);
      if (STOCHASTIC)
        for (int c = 0; c < chunks; c++) random.begin(c, (at.first + begin) / CHUNK + c);
      for (int64_t row = at.top; row < at.bottom; row++) {
        if (STOCHASTIC)
          for (int c = 0; c < chunks; c++) random.draw(c, c, row);
        for (int64_t column = begin; column < end; column += TILE) {
          const int64_t i = column - begin;
          tile(at, numbers, row, column, random.drawn[i / CHUNK][i % CHUNK / TILE], out);
        }
      }
    }
    if (pairs_along_rows) store_pairs_along_rows(at, numbers);
  }

  void run(int64_t begin, int64_t end) {
    const GridTasks tasks = grid_tasks(g);
    UnitNumbers numbers(tasks.width);
    for (int64_t t = begin; t < end; t++) task(Place(g, tasks, t), numbers, t == 0);
    if (begin == 0 && job.exponents && rule.of_e4m3()) {
      const float of_tensor = rule.stored_of_tensor();
      memcpy(job.pairs, &of_tensor, sizeof of_tensor);
    }
  }
};

template <bool GROUPED> struct GridDecoder {
  const GridJob& job;
  const GridDesc& g = *job.grid;
  const CodecDesc& p = g.codec;
  const int item = size_of(p.dtype);
  const ScaleRule rule{g, 0};
  const Elements elements{g};
  const Unpacker unpacker{p.bits};
  const uint8_t* const codes_end = job.codes + p.outer * p.rows * p.row_bytes;

  void set_factors(const Place& at, const Units<GROUPED>& units, UnitNumbers& numbers, ScaleRule& of_scales) const {
    if (rule.of_e4m3()) memcpy(&of_scales.of_tensor, job.pairs, sizeof of_scales.of_tensor);
    for (int64_t b = 0; b < units.blocks; b++) {
      const int64_t index = at.scale + b * at.scale_stride;
      if (g.rule == FP32_AMAX) memcpy(numbers.key + b, job.exponents + 4 * index, 4);
      else numbers.key[b] = job.exponents[index];
      if (g.pair && p.along_rows) numbers.pairs[b] = job.pairs[index];
    }
    for (int64_t b = 0; b < units.blocks; b += LANES) write(numbers.down + b, of_scales.down(read<I>(numbers.key + b)));
    units.spread(numbers.down);
  }

  INLINE I low(const Place& at, const UnitNumbers& numbers, int64_t row, int64_t column, int v) const {
    if (p.along_rows) return -(read<I>(numbers.pairs + column + v * LANES) >> (int)((row - at.top) / 2) & 1);
    I pair;
    for (int i = 0; i < LANES; i++) pair[i] = (v * LANES + i) % 16 / 2;
    const int64_t group = at.scale + column / 16 + v * LANES / 16;
    const int32_t byte = column + v * LANES < at.columns ? job.pairs[group] : 0;
    return -(splat(byte) >> pair & 1);
  }

  INLINE void tile(const Place& at, const UnitNumbers& numbers, int64_t row, int64_t column) const {
    const int64_t n = at.columns - column, all = at.first + column;
    const uint8_t* from = job.codes + row * p.row_bytes + all / 8 * p.bits;
    uint8_t few[TILE * 2 + 16];
    if (codes_end - from < TILE / 8 * p.bits + 16) from = (const uint8_t*)memcpy(few, from, (size_t)(codes_end - from));
    F x[VECTORS];
    unpacker.tile(from, x);
    EACH_VECTOR(v) x[v] = elements.value(nearest(x[v]), p.bits);
    if (g.pair) EACH_VECTOR(v) x[v] = choose(low(at, numbers, row, column, v), x[v] * 0.5f, x[v]);
    EACH_VECTOR(v) x[v] *= Units<GROUPED>::of(numbers.down, column, v);
    if (g.prescale != 1) EACH_VECTOR(v) x[v] /= g.prescale;
    alignas(64) uint8_t waiting[TILE * 4];
    uint8_t* const to = (uint8_t*)job.out + (row * p.columns + all) * item;
    store_tile(n < TILE ? waiting : to, p.dtype, x, job.past_caches && n >= TILE, false);
    if (n < TILE) memcpy(to, waiting, (size_t)(n * item));
  }

  void run(int64_t begin, int64_t end) const {
    const GridTasks tasks = grid_tasks(g);
    UnitNumbers numbers(tasks.width);
    ScaleRule of_scales = rule;
    for (int64_t t = begin; t < end; t++) {
      const Place at(g, tasks, t);
      set_factors(at, Units<GROUPED>(g, at.columns), numbers, of_scales);
      for (int64_t row = at.top; row < at.bottom; row++)
        for (int64_t column = 0; column < at.columns; column += TILE) tile(at, numbers, row, column);
    }
  }
};

template <bool STOCHASTIC, class Sink> void encode_grid(const GridJob& job, int64_t begin, int64_t end) {
  if (in_groups(*job.grid)) GridEncoder<STOCHASTIC, Sink, true>{job}.run(begin, end);
  else GridEncoder<STOCHASTIC, Sink, false>{job}.run(begin, end);
}

void quantize_grid(const GridJob& job, int64_t begin, int64_t end) {
  const bool stochastic = job.desc->stochastic;
  stochastic ? encode_grid<true, ValueSink>(job, begin, end) : encode_grid<false, ValueSink>(job, begin, end);
  end_of_streams();
}

void pack_grid(const GridJob& job, int64_t begin, int64_t end) {
  const bool stochastic = job.desc->stochastic;
  stochastic ? encode_grid<true, CodeSink>(job, begin, end) : encode_grid<false, CodeSink>(job, begin, end);
}

void unpack_grid(const GridJob& job, int64_t begin, int64_t end) {
  if (in_groups(*job.grid)) GridDecoder<true>{job}.run(begin, end);
  else GridDecoder<false>{job}.run(begin, end);
  end_of_streams();
}

}  // namespace
