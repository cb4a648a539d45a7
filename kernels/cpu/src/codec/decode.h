// Unpacking: codes back to values. A TILE of columns at a time; one that is cut short goes through a copy.
#pragma once

#include "bits.h"
#include "formats/signed.h"

namespace {

template <class Grid> struct Decoder {
  const CodecJob& job;
  const CodecDesc& p = *job.desc;
  const int item = size_of(p.dtype);
  const Grid grid{job};
  const Unpacker unpacker{p.bits};
  const uint8_t* const codes_end = job.codes + p.outer * p.rows * p.row_bytes;

  const uint8_t* codes(int64_t row, int64_t column) const {
    return job.codes + row * p.row_bytes + column / 8 * p.bits;
  }
  uint8_t* values(int64_t row, int64_t column) const {
    return (uint8_t*)job.out + (row * p.columns + column) * item;
  }
  // Where the unpacker may read as it likes.
  bool inside(const uint8_t* from) const { return codes_end - from >= TILE / 8 * p.bits + 16; }

  // A tile of n columns under any exponents, one for each column.
  __attribute__((noinline)) void slow_tile(const uint8_t* from, int n, const uint8_t exponent[TILE],
                                           uint8_t* to) const {
    F value[VECTORS];
    uint8_t few[TILE * 2 + 16];
    if (!inside(from)) from = (const uint8_t*)memcpy(few, from, (size_t)(codes_end - from));
    unpacker.tile(from, value);
    EACH_VECTOR(v) {
      value[v] = grid.any_factors(widened(exponent + v * LANES)).values_of(value[v]);
    }
    alignas(64) uint8_t waiting[TILE * 4];
    store_tile(waiting, p.dtype, value, false, false);
    memcpy(to, waiting, (size_t)((n < TILE ? n : TILE) * item));
  }

  // n columns from (row, column), at most BATCH_COLUMNS; blocks along the columns, or one for the tensor.
  void batch(int64_t row, int64_t column, int n) const {
    const int32_t dtype = p.dtype;
    const bool in_groups = p.block_size % 16 == 0, exact = exact_in_bf16(p);
    const bool past_caches = job.past_caches, prefetches = job.prefetch;
    const uint8_t* exponent = p.block_size ? job.exponents + row * ceil_div(p.columns, p.block_size) : nullptr;
    const int groups = (n + 15) / 16, tile_codes = TILE / 8 * p.bits, tile_bytes = TILE * item;
    const uint8_t* group = exponent + column / 16;
    uint8_t copy[BATCH_COLUMNS / 16];
    if (p.block_size != 16 || n < BATCH_COLUMNS) {
      memset(copy, p.block_size ? 0 : job.tensor_exponent, sizeof copy);
      for (int g = 0; p.block_size && in_groups && g < groups; g++) copy[g] = exponent[(column + 16 * g) / p.block_size];
      for (int g = groups; g < BATCH_COLUMNS / 16; g++) copy[g] = copy[0];
      group = copy;
    }
    FactorsOfGroups<Grid, false> factors;
    factors.set(group, grid);

    const Unpacker unpack = unpacker;
    const Grid on = grid;
    const uint8_t* from = codes(row, column);
    uint8_t* to = values(row, column);
    for (int64_t at = 0; at < n; at += TILE, from += tile_codes, to += tile_bytes) {
      const bool ordinary = factors.ordinary || on.all_ordinary(read<uint32_t>(group + at / 16));
      if (in_groups && ordinary && n - at >= TILE && inside(from)) {
        F value[VECTORS];
        unpack.tile(from, value);
        EACH_VECTOR(v) value[v] *= factors.of(at / 16, v).step_or_most;
        if (prefetches) prefetch<3, true>((uintptr_t)to + PAGE, tile_bytes);
        store_tile(to, dtype, value, past_caches, exact);
      } else {
        uint8_t each[TILE] = {};
        if (in_groups) each_of_groups(group + at / 16, each);
        else for (int c = 0; c < TILE && at + c < n; c++) each[c] = exponent[(column + at + c) / p.block_size];
        slow_tile(from, n - (int)at, each, to);
      }
    }
  }

  void columns(int64_t begin, int64_t end) const {
    const int64_t tiles = ceil_div(p.columns, TILE);
    int64_t row = begin / tiles, tile = begin % tiles;
    while (begin < end) {
      int64_t run = tiles - tile < end - begin ? tiles - tile : end - begin;
      if (run > BATCH_COLUMNS / TILE) run = BATCH_COLUMNS / TILE;
      const int64_t column = tile * TILE;
      batch(row, column, (int)(p.columns - column < run * TILE ? p.columns - column : run * TILE));
      begin += run, tile += run;
      if (tile == tiles) tile = 0, row++;
    }
  }

  // Blocks along the rows, a block's rows in a tile's columns at a time.
  void rows(int64_t begin, int64_t end) const {
    const int64_t tiles = ceil_div(p.columns, TILE), per_outer = ceil_div(p.rows, p.block_size);
    const int64_t row_bytes = p.row_bytes, stride = p.columns * item;
    const int32_t dtype = p.dtype;
    const bool past_caches = job.past_caches, prefetches = job.prefetch, exact = exact_in_bf16(p);
    const Unpacker unpack = unpacker;
    constexpr int few = 4;  // tiles
    for (; begin < end; begin++) {
      const int64_t block = begin / tiles, column = begin % tiles * TILE;
      const int64_t outer = block / per_outer, top = outer * p.rows + block % per_outer * p.block_size;
      const int64_t last = (outer + 1) * p.rows, bottom = top + p.block_size < last ? top + p.block_size : last;
      const int n = (int)(p.columns - column < TILE ? p.columns - column : TILE);
      uint8_t each[TILE];
      memset(each, job.exponents[block * p.columns + column], TILE);
      memcpy(each, job.exponents + block * p.columns + column, (size_t)n);
      I unusual = {};
      F step[VECTORS], unused;
      EACH_VECTOR(v) {
        const I e = widened(each + v * LANES);
        unusual |= grid.not_ordinary(e);
        grid.template ordinary_factors<false>(e, unused, step[v]);
      }
      const uint8_t* from = codes(top, column);
      uint8_t* to = values(top, column);
      alignas(64) uint8_t waiting[TILE * 4];  // a narrow tile
      const bool whole = n == TILE, ordinary = !any(unusual) && inside(codes(bottom - 1, column));
      const int64_t ahead = column + few * TILE < p.columns ? few * TILE : p.block_size * p.columns - column;
      for (int64_t row = top; row < bottom; row++, from += row_bytes, to += stride) {
        if (ordinary) {
          F value[VECTORS];
          unpack.tile(from, value);
          EACH_VECTOR(v) value[v] *= step[v];
          if (prefetches && whole) prefetch<3, true>((uintptr_t)to + ahead * item, TILE * item);
          store_tile(whole ? to : waiting, dtype, value, past_caches && whole, exact);
          if (!whole) memcpy(to, waiting, (size_t)(n * item));
        } else {
          slow_tile(from, n, each, to);
        }
      }
    }
  }
};

}  // namespace
