// Quantising and packing: exponents, then codes or values on the grid, then where they go (a Sink).
//
// Work goes a TILE of columns at a time, through stages over a batch of tiles. Whole tiles with ordinary exponents take
// the fast path; the others go through copies padded with zeros, which alter neither a largest value nor a code.
#pragma once

#include "signed.h"
#include "sinks.h"

namespace {

// A whole tile under ordinary exponents.
template <bool STOCHASTIC, class Sink, class Grid, class GetFactors, class Codes>
INLINE void fast_tile(const uint8_t* from, int32_t dtype, const Grid& grid, GetFactors factors, Codes codes,
                      const Numbers& numbers, const Sink& sink, uint8_t* to) {
  F x[VECTORS];
  load_tile(from, dtype, x);
  if constexpr (Sink::VALUES && !STOCHASTIC) {
    EACH_VECTOR(v) x[v] = grid.quantized(x[v], factors(v), codes);
    sink.put(x, to, true);
  } else {
    I code[VECTORS];
    EACH_VECTOR(v) code[v] = round_to_code<STOCHASTIC>(x[v] * factors(v).up_or_shift, codes, numbers, v);
    if constexpr (Sink::VALUES) {
      EACH_VECTOR(v) x[v] = value_of(code[v], factors(v).step_or_most);
      sink.put(x, to, true);
    } else {
      sink.put(code, to);
    }
  }
}

// Hot loops work on copies of members: the compiler must take any byte they write for a member's.
template <bool STOCHASTIC, class Sink, class Grid> struct Encoder {
  static constexpr bool VALUES = Sink::VALUES;
  typedef decltype(Grid::key_of(F{})) Key;
  const CodecJob& job;
  const CodecDesc& p = *job.desc;
  const int item = size_of(p.dtype);
  Grid grid{job};
  const decltype(grid.codes()) all_codes = grid.codes();
  const Sink sink{job};
  Random random{job.seed};
  int64_t begun = -1;  // the block that random.starts begins with

  const uint8_t* values(int64_t row, int64_t column) const {
    return (const uint8_t*)job.values + (row * p.columns + column) * item;
  }

  // Values that are soon to be read are prefetched. To draw random numbers takes much of the time, so the first half of
  // each tile is prefetched then, and the second when another is rounded. Rounding to nearest prefetches all of it.
  INLINE void prefetch_while_drawing(uintptr_t chunk) const {
    for (int s = 0; s < CHUNK / TILE; s++) prefetch<2>(chunk + s * TILE * item, TILE * item / 2);
  }
  INLINE void prefetch_while_rounding(uintptr_t tile) const {
    const int done = STOCHASTIC ? TILE * item / 2 : 0;
    prefetch<2>(tile + done, TILE * item - done);
  }

  INLINE void load_columns(const uint8_t* x, int n, F value[VECTORS]) const {
    alignas(64) uint8_t few[TILE * 4];
    if (n < TILE) {
      memset(few, 0, sizeof few);
      x = (const uint8_t*)memcpy(few, x, (size_t)(n * item));
    }
    load_tile(x, p.dtype, value);
  }

  // A tile of n columns under any exponents, one for each column.
  __attribute__((noinline)) void slow_tile(const uint8_t* from, int n, const uint8_t exponent[TILE],
                                           const Numbers& numbers, uint8_t* to) const {
    F x[VECTORS];
    I code[VECTORS];
    load_columns(from, n, x);
    EACH_VECTOR(v) {
      const auto f = grid.any_factors(widened(exponent + v * LANES));
      const F t = f.codes_of(x[v]) * splat(Grid::FRACTIONS);
      code[v] = round_to_code<STOCHASTIC>(t, all_codes, numbers, v);
      if constexpr (VALUES) x[v] = f.values_of(__builtin_convertvector(code[v], F));
      else code[v] &= t == t;
    }
    alignas(64) uint8_t waiting[TILE * 4];
    if constexpr (VALUES) sink.put(x, waiting, false);
    else sink.put(code, waiting);
    memcpy(to, waiting, sink.size(n < TILE ? n : TILE));
  }

  // ---- boxes along the columns ----

  // n columns from (row, column) on, at most BATCH_COLUMNS. Boxes of 16 find their exponents here; else
  // exponent[i / box] is that of column - skipped + i.
  void batch(int64_t row, int64_t column, int n, const uint8_t* exponent, int64_t skipped) {
    const int tiles = (n + TILE - 1) / TILE, tile_bytes = TILE * item;
    const int32_t dtype = p.dtype;
    const bool in_groups = p.box % 16 == 0, from_memory = job.from_memory;
    const uint8_t* x = values(row, column);
    uint32_t four[BATCH_COLUMNS / TILE];  // a group's exponent in each byte
    uint8_t* const group = (uint8_t*)four;
    alignas(64) uint32_t key[Grid::SIGNED ? BATCH_COLUMNS / 16 : 1];  // of a group
    if (p.box == 16) {
      for (int i = 0; i < tiles; i++) {
        F value[VECTORS];
        if (from_memory && !STOCHASTIC) prefetch<2>((uintptr_t)(x + i * tile_bytes) + PAGE, tile_bytes);
        load_columns(x + i * tile_bytes, n - i * TILE, value);
        if constexpr (Grid::SIGNED) keys_of(value, key + 4 * i);
        else four[i] = exponents_of(value);
      }
      if constexpr (Grid::SIGNED) {
        memset(key + 4 * tiles, 0, sizeof key - 16 * (size_t)tiles);
        for (int g = 0; g < BATCH_COLUMNS / 16; g += LANES) write_bytes(group + g, grid.scales_of(read<U>(key + g)));
      }
    } else if (in_groups) {
      memset(group, job.tensor_exponent, sizeof four);
      for (int g = 0; p.box && 16 * g < n; g++) group[g] = exponent[(skipped + 16 * g) / p.box];
    }
    for (int i = n / TILE; i < BATCH_COLUMNS / TILE; i++) four[i] = i < tiles ? four[i] : four[0];
    FactorsOfGroups<Grid, VALUES> factors;
    factors.set(group, grid);
    if (STOCHASTIC) {
      if (begun != column / CHUNK) {
        begun = column / CHUNK;
        for (int c = 0; c < BATCH_COLUMNS / CHUNK; c++) random.begin(c, begun + c);
      }
      for (int c = 0; c * CHUNK < n; c++) {
        if (from_memory) prefetch_while_drawing((uintptr_t)(x + c * CHUNK * item) + PAGE);
        random.draw(c, c, row);
      }
    }

    const Sink out = sink;
    const auto codes = all_codes;
    const Grid on = grid;
    uint8_t* to = out.place(row, column);
    for (int64_t i = 0; i < tiles; i++, x += tile_bytes, to += out.tile_stride()) {
      const int at = (int)i * TILE;
      const Numbers& numbers = random.drawn[at / CHUNK][at % CHUNK / TILE];
      if (in_groups && n - at >= TILE && (factors.ordinary || on.all_ordinary(four[i]))) {
        auto factors_of = [&](int v) ALWAYS { return factors.of(i * TILE / 16, v); };
        out.prefetch_ahead(to, PAGE);
        if (STOCHASTIC && from_memory) prefetch_while_rounding((uintptr_t)x + PAGE);
        fast_tile<STOCHASTIC>(x, dtype, on, factors_of, codes, numbers, out, to);
      } else {
        uint8_t each[TILE] = {};
        if (in_groups) each_of_groups(group + at / 16, each);
        else for (int c = 0; c < TILE && at + c < n; c++) each[c] = exponent[(skipped + at + c) / p.box];
        slow_tile(x, n - at, each, numbers, to);
      }
    }
    if (p.box == 16 && job.exponents) {
      uint8_t* const exponents = job.exponents + row * ceil_div(p.columns, 16) + column / 16;
      if (n == BATCH_COLUMNS) memcpy(exponents, four, sizeof four);
      else memcpy(exponents, four, (size_t)ceil_div(n, 16));
    }
  }

  // The exponents of boxes of any size along the columns first..last - 1, which hold whole boxes.
  void find_exponents(int64_t row, int64_t first, int64_t last, uint8_t exponent[CHUNK]) {
    alignas(64) uint32_t key[CHUNK] = {};
    for (int64_t column = first; column < last; column += TILE) {
      const int n = (int)(last - column < TILE ? last - column : TILE);
      F value[VECTORS];
      alignas(64) uint32_t found[TILE];
      load_columns(values(row, column), n, value);
      EACH_VECTOR(v) write(found + v * LANES, Grid::key_of(value[v]));
      for (int i = 0; i < n; i++) {
        uint32_t& most = key[(column - first + i) / p.box];
        most = found[i] > most ? found[i] : most;
      }
    }
    for (int b = 0; b < CHUNK; b += LANES) write_bytes(exponent + b, grid.scales_of(read<Key>(key + b)));
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
      for (int64_t column = first; column < last; column += BATCH_COLUMNS)
        batch(row, column, (int)(last - column < BATCH_COLUMNS ? last - column : BATCH_COLUMNS), exponent,
              column - first);
      begin += run, strip += run;
      if (strip == tasks.strips) strip = 0, row++;
    }
  }

  // ---- boxes along the rows ----

  // The scale of each of n columns from `column`, over rows top..bottom - 1. A few rows at a time are
  // read as far as they go, which is how memory is fastest.
  void largest_of_columns(int64_t top, int64_t bottom, int64_t column, int n, int32_t exponent[BATCH_COLUMNS]) {
    constexpr int together = 4;
    const int64_t stride = p.columns * item;
    for (int64_t row = top; row < bottom; row += together) {
      const int rows = (int)(bottom - row < together ? bottom - row : together);
      for (int i = 0; i < n; i += TILE) {
        Key most[VECTORS];
        EACH_VECTOR(v) most[v] = row == top ? Key{} : read<Key>(exponent + i + v * LANES);
        const uint8_t* x = values(row, column + i);
        for (int r = 0; r < rows; r++, x += stride) {
          F value[VECTORS];
          load_columns(x, n - i, value);
          EACH_VECTOR(v) most[v] = max_of(most[v], Grid::key_of(value[v]));
        }
        EACH_VECTOR(v) write(exponent + i + v * LANES, row + together < bottom ? (I)most[v] : grid.scales_of(most[v]));
      }
    }
  }

  // A tile of n columns of rows top..bottom - 1; prefetches the values `ahead` meanwhile.
  void rows_of_tile(int64_t top, int64_t bottom, int64_t column, int n, const int32_t exponent[TILE],
                    int64_t ahead) const {
    I unusual = {};
    Factors factors[VECTORS];
    EACH_VECTOR(v) {
      const I e = read<I>(exponent + v * LANES);
      unusual |= grid.not_ordinary(e);
      grid.template ordinary_factors<VALUES>(e, factors[v].up_or_shift, factors[v].step_or_most);
    }
    const Sink out = sink;
    const auto codes = all_codes;
    const Grid on = grid;
    const int32_t dtype = p.dtype;
    const int64_t stride = p.columns * item, ahead_bytes = ahead * item;
    const int rows = (int)(bottom - top), half = (int)(column % CHUNK / TILE);
    const uint8_t* x = values(top, column);
    uint8_t* to = out.place(top, column);
    if (n >= TILE && !any(unusual)) {
      for (int r = 0; r < rows; r++, x += stride, to += out.row_stride()) {
        prefetch_while_rounding((uintptr_t)x + ahead_bytes);
        out.prefetch_ahead(to, out.tile_stride());
        auto factors_of = [&](int v) ALWAYS { return factors[v]; };
        fast_tile<STOCHASTIC>(x, dtype, on, factors_of, codes, random.drawn[r][half], out, to);
      }
    } else {
      uint8_t each[TILE];
      for (int c = 0; c < TILE; c++) each[c] = (uint8_t)exponent[c];
      for (int r = 0; r < rows; r++, x += stride, to += out.row_stride())
        slow_tile(x, n, each, random.drawn[r][half], to);
    }
  }

  void rows(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    alignas(64) int32_t exponent[BATCH_COLUMNS];
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
      // the hardware prefetcher follows a row, but not the jump to the next rows
      const int64_t ahead = strip + run < tasks.strips ? run * CHUNK : p.box * p.columns - column;
      for (int c = 0; c < n; c += CHUNK) {
        if (STOCHASTIC) random.begin(0, strip + c / CHUNK);
        for (int64_t row = top; row < bottom; row += SLOTS) {
          const int64_t until = row + SLOTS < bottom ? row + SLOTS : bottom;
          if (STOCHASTIC)
            for (int64_t r = row; r < until; r++) {
              prefetch_while_drawing((uintptr_t)values(r, column + c + ahead));
              random.draw((int)(r - row), 0, r);
            }
          for (int i = c; i < n && i < c + CHUNK; i += TILE)
            rows_of_tile(row, until, column + i, n - i, exponent + i, ahead);
        }
      }
      begin += run;
    }
  }
};

}  // namespace
