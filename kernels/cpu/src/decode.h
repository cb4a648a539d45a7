// Unpacking: codes back to values. A STEP of columns at a time; one that is not whole goes through a copy.
#pragma once

#include "bits.h"
#include "rounding.h"

namespace {

struct Decoder {
  const Job& job;
  const Plan& p = *job.plan;
  const int item = size_of(p.dtype);
  const int least = least_ordinary(p.bits, false);
  const Unpacker unpacker{p.bits};
  const uint8_t* const codes_end = job.codes + p.outer * p.rows * p.row_bytes;

  const uint8_t* codes(int64_t row, int64_t column) const {
    return job.codes + row * p.row_bytes + column / 8 * p.bits;
  }
  uint8_t* values(int64_t row, int64_t column) const {
    return (uint8_t*)job.out + (row * p.columns + column) * item;
  }
  // Where the unpacker may read as it likes.
  bool inside(const uint8_t* from) const { return codes_end - from >= STEP / 8 * p.bits + 16; }

  // A step of n columns under any exponents, one for each column.
  __attribute__((noinline)) void any_step(const uint8_t* from, int n, const uint8_t exponent[STEP], uint8_t* to) const {
    F value[UNITS];
    uint8_t few[STEP * 2 + 16];
    if (!inside(from)) from = (const uint8_t*)memcpy(few, from, (size_t)(codes_end - from));
    unpacker.step(from, value);
    EACH_UNIT(u) {
      const AnyFactors f(widened(exponent + u * LANES), p.bits);
      value[u] = value[u] * f.down * f.down_more;
    }
    alignas(64) uint8_t waiting[STEP * 4];
    store_step(waiting, p.dtype, value, false, false);
    memcpy(to, waiting, (size_t)((n < STEP ? n : STEP) * item));
  }

  // n columns from (row, column), at most WIDE; boxes along the columns, or one for the tensor.
  void batch(int64_t row, int64_t column, int n) const {
    const int32_t dtype = p.dtype;
    const bool in_groups = p.box % 16 == 0, past_caches = job.stream, asks = job.ask, exact = p.bits <= 9;
    const uint8_t* exponent = p.box ? job.exponents + row * ceil_div(p.columns, p.box) : nullptr;
    const int groups = (n + 15) / 16, step_codes = STEP / 8 * p.bits, step_bytes = STEP * item;
    const uint8_t* group = exponent + column / 16;
    uint8_t copy[WIDE / 16];
    if (p.box != 16 || n < WIDE) {
      memset(copy, p.box ? 0 : job.tensor_exponent, sizeof copy);
      for (int g = 0; p.box && in_groups && g < groups; g++) copy[g] = exponent[(column + 16 * g) / p.box];
      for (int g = groups; g < WIDE / 16; g++) copy[g] = copy[0];
      group = copy;
    }
    FactorsOfGroups<false, false> factors;
    factors.set(group, p.bits, least);

    const Unpacker unpack = unpacker;
    const uint8_t* from = codes(row, column);
    uint8_t* to = values(row, column);
    for (int64_t at = 0; at < n; at += STEP, from += step_codes, to += step_bytes) {
      const bool ordinary = factors.ordinary || all_ordinary(read<uint32_t>(group + at / 16), least);
      if (in_groups && ordinary && n - at >= STEP && inside(from)) {
        F value[UNITS];
        unpack.step(from, value);
        EACH_UNIT(u) value[u] *= factors.of(at / 16, u).step_or_most;
        if (asks) ask_for<3, true>((uintptr_t)to + PAGE, step_bytes);
        store_step(to, dtype, value, past_caches, exact);
      } else {
        uint8_t each[STEP] = {};
        if (in_groups) each_of_groups(group + at / 16, each);
        else for (int c = 0; c < STEP && at + c < n; c++) each[c] = exponent[(column + at + c) / p.box];
        any_step(from, n - (int)at, each, to);
      }
    }
  }

  void columns(int64_t begin, int64_t end) const {
    const int64_t steps = ceil_div(p.columns, STEP);
    int64_t row = begin / steps, step = begin % steps;
    while (begin < end) {
      int64_t run = steps - step < end - begin ? steps - step : end - begin;
      if (run > WIDE / STEP) run = WIDE / STEP;
      const int64_t column = step * STEP;
      batch(row, column, (int)(p.columns - column < run * STEP ? p.columns - column : run * STEP));
      begin += run, step += run;
      if (step == steps) step = 0, row++;
    }
  }

  // Boxes along the rows, a box's rows in a step's columns at a time.
  void rows(int64_t begin, int64_t end) const {
    const int64_t steps = ceil_div(p.columns, STEP), per_outer = ceil_div(p.rows, p.box);
    const int64_t row_bytes = p.row_bytes, stride = p.columns * item;
    const int32_t dtype = p.dtype;
    const bool past_caches = job.stream, asks = job.ask, exact = p.bits <= 9;
    const Unpacker unpack = unpacker;
    constexpr int few = 4;  // steps
    for (; begin < end; begin++) {
      const int64_t block = begin / steps, column = begin % steps * STEP;
      const int64_t outer = block / per_outer, top = outer * p.rows + block % per_outer * p.box;
      const int64_t last = (outer + 1) * p.rows, bottom = top + p.box < last ? top + p.box : last;
      const int n = (int)(p.columns - column < STEP ? p.columns - column : STEP);
      uint8_t each[STEP] = {};
      memcpy(each, job.exponents + block * p.columns + column, (size_t)n);
      I unusual = {};
      F step[UNITS], unused;
      EACH_UNIT(u) {
        const I e = widened(each + u * LANES);
        unusual |= not_ordinary(e, least);
        ordinary_factors<false, false>(e, p.bits, unused, step[u]);
      }
      const uint8_t* from = codes(top, column);
      uint8_t* to = values(top, column);
      const bool ordinary = !any(unusual) && inside(codes(bottom - 1, column));
      const int64_t ahead = column + few * STEP < p.columns ? few * STEP : p.box * p.columns - column;
      for (int64_t row = top; row < bottom; row++, from += row_bytes, to += stride) {
        if (ordinary) {
          F value[UNITS];
          unpack.step(from, value);
          EACH_UNIT(u) value[u] *= step[u];
          if (asks) ask_for<3, true>((uintptr_t)to + ahead * item, STEP * item);
          store_step(to, dtype, value, past_caches, exact);
        } else {
          any_step(from, n, each, to);
        }
      }
    }
  }
};

}  // namespace
