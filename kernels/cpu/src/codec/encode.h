// Quantizing and packing: exponents, then codes or values on the grid, then their output (a Sink).
//
// Work goes a TILE of columns at a time, through stages over a batch of tiles. Whole tiles with ordinary exponents take
// the fast path; the others go through copies padded with zeros, which alter neither a largest value nor a code.
#pragma once

#include "formats/signed.h"
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
  const uint8_t* const values_end = (const uint8_t*)job.values + p.outer * p.rows * p.columns * item;
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

  INLINE void load_columns(const uint8_t* x, int32_t dtype, int n, F value[VECTORS]) const {
    alignas(64) uint8_t few[TILE * 4];
    if (n < TILE) {
      memset(few, 0, sizeof few);
      x = (const uint8_t*)memcpy(few, x, (size_t)(n * item));
    }
    load_tile(x, dtype, value);
  }

  // A tile of n columns under any exponents, one for each column.
  __attribute__((noinline)) void slow_tile(const uint8_t* from, int n, const uint8_t exponent[TILE],
                                           const Numbers& numbers, uint8_t* to) const {
    F x[VECTORS];
    I code[VECTORS];
    load_columns(from, p.dtype, n, x);
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

  // The random numbers of n columns of a row that begins at x; values `ahead` bytes further on are prefetched meanwhile.
  INLINE void draw(int64_t row, int n, const uint8_t* x, int32_t dtype, int64_t ahead) {
    for (int c = 0; c * CHUNK < n; c++) {
      if (job.from_memory) prefetch_while_drawing((uintptr_t)(x + c * CHUNK * size_of(dtype)) + ahead);
      random.draw(c, c, row);
    }
  }

  // ---- blocks along the columns ----

  // Numbers of groups become those of their blocks, of `each` groups.
  template <class T> static INLINE void largest_of_blocks(T* group, int each) {
    for (int first = 0; first < BATCH_COLUMNS / 16; first += each) {
      T most = group[first];
      for (int i = 1; i < each; i++) most = group[first + i] > most ? group[first + i] : most;
      for (int i = 0; i < each; i++) group[first + i] = most;
    }
  }

  // The exponents of the groups of a batch, a byte each, whose blocks are of `each` groups.
  INLINE void find_exponents_of_groups(const uint8_t* x, int32_t dtype, int n, int each,
                                       uint32_t four[BATCH_COLUMNS / TILE]) {
    const int tiles = (n + TILE - 1) / TILE, tile_bytes = TILE * size_of(dtype);
    const bool prefetches = job.from_memory && !STOCHASTIC;
    alignas(64) uint32_t key[Grid::SIGNED ? BATCH_COLUMNS / 16 : 1];  // of a group
    // four tiles at once, as memory that is read in one piece should have been written in one piece
    for (int i = 0; i < BATCH_COLUMNS / TILE; i += 4) {
      U most[4] = {};
#pragma GCC unroll 4
      for (int t = 0; t < 4; t++) {
        const uint8_t* const tile = x + (i + t) * tile_bytes;
        if (i + t >= tiles) break;
        F value[VECTORS];
        if (prefetches) prefetch<2>((uintptr_t)tile + PAGE, tile_bytes);
        load_columns(tile, dtype, n - (i + t) * TILE, value);
        most[t] = Grid::SIGNED ? keys_of(value) : exponents_of(value);
      }
      if constexpr (Grid::SIGNED) largest_of_parts(most, key + 4 * i);
      else largest_bytes(most, four + i);
    }
    uint8_t* const group = (uint8_t*)four;
    if constexpr (!Grid::SIGNED) {
      if (each > 1) largest_of_blocks(group, each);
    } else {
      if (each > 1) largest_of_blocks(key, each);
      for (int g = 0; g < BATCH_COLUMNS / 16; g += LANES) write_bytes(group + g, grid.scales_of(read<U>(key + g)));
    }
  }

  // Whether blocks are groups of 16 columns, or several, and a batch holds whole ones.
  bool in_batches() const { return p.block_size % 16 == 0 && p.block_size && BATCH_COLUMNS % p.block_size == 0; }

  // n columns from (row, column) on, at most BATCH_COLUMNS. Blocks in batches find their exponents here; else
  // exponent[i / block] is that of column - skipped + i. USUAL: BATCH_COLUMNS of float32 in batches, known to the compiler.
  template <bool USUAL> void batch(int64_t row, int64_t column, int n, const uint8_t* exponent, int64_t skipped) {
    if (USUAL) n = BATCH_COLUMNS;
    const int32_t dtype = USUAL ? FLOAT32 : p.dtype;
    const int tiles = (n + TILE - 1) / TILE, tile_bytes = TILE * size_of(dtype), block_size = p.block_size;
    const bool batched = USUAL || in_batches(), in_groups = USUAL || block_size % 16 == 0, from_memory = job.from_memory;
    const uint8_t* x = values(row, column);
    uint32_t four[BATCH_COLUMNS / TILE];  // a group's exponent in each byte
    uint8_t* const group = (uint8_t*)four;
    if (batched) {
      find_exponents_of_groups(x, dtype, n, block_size / 16, four);
    } else if (in_groups) {
      memset(group, job.tensor_exponent, sizeof four);
      for (int g = 0; block_size && 16 * g < n; g++) group[g] = exponent[(skipped + 16 * g) / block_size];
    }
    for (int i = n / TILE; i < BATCH_COLUMNS / TILE; i++) four[i] = i < tiles ? four[i] : four[0];
    FactorsOfGroups<Grid, VALUES> factors;
    factors.set(group, grid);
    if (STOCHASTIC) {
      if (begun != column / CHUNK) {
        begun = column / CHUNK;
        for (int c = 0; c < BATCH_COLUMNS / CHUNK; c++) random.begin(c, begun + c);
      }
      draw(row, n, x, dtype, PAGE);
    }

    Sink out = sink;
    if constexpr (VALUES) if (USUAL) out.dtype = FLOAT32;
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
        else for (int c = 0; c < TILE && at + c < n; c++) each[c] = exponent[(skipped + at + c) / block_size];
        slow_tile(x, n - at, each, numbers, to);
      }
    }
    if (batched && job.exponents) {
      uint8_t* const exponents = job.exponents + row * ceil_div(p.columns, block_size) + column / block_size;
      if (block_size != 16) for (int b = 0; b * block_size < n; b++) exponents[b] = group[b * block_size / 16];
      else if (n == BATCH_COLUMNS) memcpy(exponents, four, sizeof four);
      else memcpy(exponents, four, (size_t)ceil_div(n, 16));
    }
  }

  // The exponents of blocks of any size along the columns first..last - 1, which hold whole blocks.
  void find_exponents(int64_t row, int64_t first, int64_t last, uint8_t exponent[CHUNK]) {
    alignas(64) uint32_t key[CHUNK] = {};
    for (int64_t column = first; column < last; column += TILE) {
      const int n = (int)(last - column < TILE ? last - column : TILE);
      F value[VECTORS];
      alignas(64) uint32_t found[TILE];
      load_columns(values(row, column), p.dtype, n, value);
      EACH_VECTOR(v) write(found + v * LANES, Grid::key_of(value[v]));
      for (int i = 0; i < n; i++) {
        uint32_t& most = key[(column - first + i) / p.block_size];
        most = found[i] > most ? found[i] : most;
      }
    }
    for (int b = 0; b < CHUNK; b += LANES) write_bytes(exponent + b, grid.scales_of(read<Key>(key + b)));
  }

  void columns(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    const bool own_exponents = p.block_size != 0 && !in_batches();
    const bool usual = in_batches() && p.dtype == FLOAT32 && p.out_dtype == FLOAT32;
    uint8_t exponent[CHUNK];
    int64_t row = begin / tasks.strips, strip = begin % tasks.strips;
    while (begin < end) {
      const int64_t first = strip * tasks.width;
      const int64_t run = own_exponents ? 1 : tasks.strips - strip < end - begin ? tasks.strips - strip : end - begin;
      const int64_t last = first + run * tasks.width < p.columns ? first + run * tasks.width : p.columns;
      if (own_exponents) {
        find_exponents(row, first, last, exponent);
        if (job.exponents)
          memcpy(job.exponents + row * ceil_div(p.columns, p.block_size) + first / p.block_size, exponent,
                 (size_t)ceil_div(last - first, p.block_size));
      }
      for (int64_t column = first; column < last; column += BATCH_COLUMNS) {
        const int n = (int)(last - column < BATCH_COLUMNS ? last - column : BATCH_COLUMNS);
        if (usual && n == BATCH_COLUMNS) batch<true>(row, column, n, exponent, column - first);
        else batch<false>(row, column, n, exponent, column - first);
      }
      begin += run, strip += run;
      if (strip == tasks.strips) strip = 0, row++;
    }
  }

  // ---- blocks along the rows ----

  // Whether a whole tile may be read, including the memory behind the columns of a narrow tile.
  INLINE bool inside(const uint8_t* x) const { return values_end - x >= TILE * item; }

  // The scale of each of n columns from `column`, over rows top..bottom - 1, and behind them that of the last. A few rows
  // at a time are read as far as they go, which is how memory is fastest. USUAL: whole tiles of float32.
  template <bool USUAL>
  void largest_of_columns(int64_t top, int64_t bottom, int64_t column, int n, int32_t exponent[BATCH_COLUMNS]) {
    constexpr int together = 4;
    const int32_t dtype = USUAL ? FLOAT32 : p.dtype;
    const int64_t stride = p.columns * item;
    for (int64_t row = top; row < bottom; row += together) {
      const int rows = (int)(bottom - row < together ? bottom - row : together);
      for (int i = 0; i < n; i += TILE) {
        Key most[VECTORS];
        EACH_VECTOR(v) most[v] = row == top ? Key{} : read<Key>(exponent + i + v * LANES);
        const uint8_t* x = values(row, column + i);
        for (int r = 0; r < rows; r++, x += stride) {
          F value[VECTORS];
          load_columns(x, dtype, USUAL || inside(x) ? TILE : n - i, value);
          EACH_VECTOR(v) most[v] = max_of(most[v], Grid::key_of(value[v]));
        }
        EACH_VECTOR(v) write(exponent + i + v * LANES, row + together < bottom ? (I)most[v] : grid.scales_of(most[v]));
      }
    }
    for (int i = n; i % TILE; i++) exponent[i] = exponent[n - 1];
  }

  // n columns of rows top..bottom - 1, given the scale of each; prefetches the values `ahead` meanwhile. USUAL: as above,
  // to float32.
  template <bool USUAL>
  void batch_of_rows(int64_t top, int64_t bottom, int64_t column, int n, const int32_t exponent[BATCH_COLUMNS],
                     int64_t ahead) {
    alignas(64) float up_or_shift[BATCH_COLUMNS], step_or_most[BATCH_COLUMNS];
    bool ordinary[BATCH_COLUMNS / TILE];
    for (int i = 0; i < n; i += TILE) {
      I unusual = {};
      EACH_VECTOR(v) {
        const I e = read<I>(exponent + i + v * LANES);
        F a, b;
        grid.template ordinary_factors<VALUES>(e, a, b);
        write(up_or_shift + i + v * LANES, a);
        write(step_or_most + i + v * LANES, b);
        unusual |= grid.not_ordinary(e);
      }
      ordinary[i / TILE] = !any(unusual);
    }
    if (STOCHASTIC)
      for (int c = 0; c * CHUNK < n; c++) random.begin(c, column / CHUNK + c);
    Sink out = sink;
    if constexpr (VALUES) {
      if (USUAL) out.dtype = FLOAT32;
      else out.past_caches &= n % TILE == 0;
    }
    alignas(64) uint8_t waiting[TILE * 4];  // a narrow tile
    const bool whole_bytes = VALUES || n * p.bits % 8 == 0;
    const auto codes = all_codes;
    const Grid on = grid;
    const int32_t dtype = USUAL ? FLOAT32 : p.dtype;
    const int tile_bytes = TILE * size_of(dtype);
    const int64_t ahead_bytes = ahead * size_of(dtype);
    for (int64_t row = bottom - 1; row >= top; row--) {  // those read last are still in the nearest cache
      const uint8_t* x = values(row, column);
      uint8_t* to = out.place(row, column);
      if (STOCHASTIC) draw(row, n, x, dtype, ahead_bytes);
      for (int i = 0; i < n; i += TILE, x += tile_bytes, to += out.tile_stride()) {
        const Numbers& numbers = random.drawn[i / CHUNK][i % CHUNK / TILE];
        const bool whole = USUAL || n - i >= TILE;
        if (ordinary[i / TILE] && (whole || (whole_bytes && inside(x)))) {
          auto factors_of = [&](int v) ALWAYS -> Factors {
            return {read<F>(up_or_shift + i + v * LANES), read<F>(step_or_most + i + v * LANES)};
          };
          if (job.from_memory) prefetch_while_rounding((uintptr_t)x + ahead_bytes);
          if (whole) out.prefetch_ahead(to, out.tile_stride());
          fast_tile<STOCHASTIC>(x, dtype, on, factors_of, codes, numbers, out, whole ? to : waiting);
          if (!whole) memcpy(to, waiting, sink.size(n - i));
        } else {
          uint8_t each[TILE];
          for (int c = 0; c < TILE; c++) each[c] = (uint8_t)exponent[i + c];
          slow_tile(x, n - i, each, numbers, to);
        }
      }
    }
  }

  void rows(int64_t begin, int64_t end) {
    const Tasks tasks = encode_tasks(p);
    const bool usual = p.dtype == FLOAT32 && p.out_dtype == FLOAT32 && p.columns % TILE == 0;
    alignas(64) int32_t exponent[BATCH_COLUMNS];
    while (begin < end) {
      const int64_t block = begin / tasks.strips, strip = begin % tasks.strips, column = strip * CHUNK;
      int64_t run = tasks.strips - strip < end - begin ? tasks.strips - strip : end - begin;
      if (run > BATCH_OF_ROWS) run = BATCH_OF_ROWS;
      const int64_t outer = block / tasks.per_outer, within = block % tasks.per_outer;
      const int64_t top = outer * p.rows + within * p.block_size, last = (outer + 1) * p.rows;
      const int64_t bottom = top + p.block_size < last ? top + p.block_size : last;
      const int n = (int)(p.columns - column < run * CHUNK ? p.columns - column : run * CHUNK);
      if (usual) largest_of_columns<true>(top, bottom, column, n, exponent);
      else largest_of_columns<false>(top, bottom, column, n, exponent);
      if (job.exponents) {
        uint8_t* to = job.exponents + block * p.columns + column;
        for (int i = 0; i < n; i++) to[i] = (uint8_t)exponent[i];
      }
      // the hardware prefetcher follows a row, but not the jump to the next rows
      const int64_t ahead = strip + run < tasks.strips ? run * CHUNK : p.block_size * p.columns - column;
      if (usual) batch_of_rows<true>(top, bottom, column, n, exponent, ahead);
      else batch_of_rows<false>(top, bottom, column, n, exponent, ahead);
      begin += run;
    }
  }
};

}  // namespace
