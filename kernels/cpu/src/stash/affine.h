// Codes on a grid of each group's own, q = clip(floor((x - low) / step + u), 0, 2^bits - 1), and back: q step + low.
#pragma once

#include "../codec/bits.h"
#include "../codec/random.h"

namespace {

// Which group the values of a job belong to, from one on.
struct GroupCursor {
  const AffineDesc& p;
  int64_t group, offset;  // of the value: its group, its place in the run

  GroupCursor(const AffineDesc& p, int64_t value)
      : p(p), group(value / p.run % p.groups), offset(value % p.run) {}
  INLINE void advance(int64_t values) {
    for (offset += values; offset >= p.run; offset -= p.run) group = group + 1 < p.groups ? group + 1 : 0;
  }
  // A group's number for each value of the tile that begins here.
  INLINE void of_tile(const float* of_group, F each[VECTORS]) const {
    if (offset + TILE <= p.run) {
      EACH_VECTOR(v) each[v] = splat(of_group[group]);
      return;
    }
    alignas(64) float few[TILE];
    GroupCursor at = *this;
    for (int i = 0; i < TILE;) {
      const int64_t left = p.run - at.offset;
      const int end = left < TILE - i ? i + (int)left : TILE, n = end - i;
      for (; i < end; i++) few[i] = of_group[at.group];
      at.advance(n);
    }
    EACH_VECTOR(v) each[v] = load(few + v * LANES);
  }
};

INLINE float least_lane(F x) {
  typedef VECTOR(float, 4) Four;
  float lane[LANES];
  store(lane, x);
  Four four = read<Four>(lane);
  for (int i = 4; i < LANES; i += 4) {
    const Four more = read<Four>(lane + i);
    four = more < four ? more : four;
  }
  const float a = four[0] < four[1] ? four[0] : four[1], b = four[2] < four[3] ? four[2] : four[3];
  return a < b ? a : b;
}

// The smallest and the largest of values; not a number if one of them is none.
struct Extent {
  F low, high;
  I nan;

  INLINE Extent() : low(splat(__builtin_inff())), high(-low), nan{} {}
  INLINE void add(F x) {
    low = smaller(x, low);
    high = larger(x, high);
    nan |= x != x;
  }
  template <class T> INLINE void add(const T* x, int64_t count) {
    for (; count >= LANES; x += LANES, count -= LANES) add(load(x));
    if (count == 0) return;
    T few[LANES];
    for (int i = 0; i < LANES; i++) few[i] = x[i < count ? i : 0];
    add(load(few));
  }
  void write_to(float* lowest, float* highest) const {
    const bool number = !any(nan);
    *lowest = number ? least_lane(low) : __builtin_nanf("");
    *highest = number ? -least_lane(-high) : __builtin_nanf("");
  }
};

template <class T> void extents_of(const AffineDesc& p, const T* x, float* low, float* high, int64_t begin, int64_t end) {
  Extent found[AFFINE_GROUPS];
  for (int64_t first = begin * p.run; first < p.count; first += p.groups * p.run)
    for (int64_t g = begin, at = first; g < end && at < p.count; g++, at += p.run)
      found[g - begin].add(x + at, at + p.run < p.count ? p.run : p.count - at);
  for (int64_t g = begin; g < end; g++) found[g - begin].write_to(low + g, high + g);
}

// Finds the extents of groups begin..end, at most AFFINE_GROUPS.
void affine_extents(const AffineJob& job, int64_t begin, int64_t end) {
  const AffineDesc& p = *job.desc;
  switch (p.dtype) {
    case FLOAT32: return extents_of(p, (const float*)job.values, job.low, job.step, begin, end);
    case BFLOAT16: return extents_of(p, (const bf16*)job.values, job.low, job.step, begin, end);
    case FLOAT16: return extents_of(p, (const half*)job.values, job.low, job.step, begin, end);
  }
}

INLINE void pack_unsigned(const I code[VECTORS], int bits, uint8_t* out) {
  switch (bits) {
    case 2: return pack_tile<2>(code, bits, out);
    case 4: return pack_tile<4>(code, bits, out);
    case 6: return pack_tile<6>(code, bits, out);
    case 8:
      EACH_VECTOR(v) write_bytes(out + v * LANES, code[v]);
      return;
    default: return pack_tile<0>(code, bits, out);
  }
}

constexpr int CHUNK_TILES = CHUNK / TILE, BATCH_TILES = BATCH * CHUNK_TILES;

// The random numbers of the tiles from one on to the end of its batch: a draw is a long chain of dependent
// instructions, and those of several chunks overlap.
INLINE void draw_batch(Random& random, int64_t tile, int64_t end) {
  const int64_t chunks = ceil_div(end, CHUNK_TILES);
  int64_t chunk = tile / CHUNK_TILES;
  for (int slot = (int)(chunk % BATCH); slot < BATCH && chunk < chunks; slot++, chunk++) {
    random.begin(slot, chunk);
    random.draw(slot, slot, 0);
  }
}

template <bool STOCHASTIC> void affine_encode(const AffineJob& job, int64_t begin, int64_t end) {
  const AffineDesc& p = *job.desc;
  const int item = size_of(p.dtype), tile_bytes = TILE / 8 * p.bits;
  const F most = splat((float)((1 << p.bits) - 1));
  GroupCursor cursor(p, begin * TILE);
  Random random(job.seed);
  for (int64_t tile = begin; tile < end; tile++, cursor.advance(TILE)) {
    if (STOCHASTIC && (tile == begin || tile % BATCH_TILES == 0)) draw_batch(random, tile, end);
    const Numbers& numbers = random.drawn[tile % BATCH_TILES / CHUNK_TILES][tile % CHUNK_TILES];
    const uint8_t* from = (const uint8_t*)job.values + tile * TILE * item;
    const int64_t left = p.count - tile * TILE;
    alignas(64) uint8_t few[TILE * 4];
    if (left < TILE) {
      memset(few, 0xff, sizeof few);  // NaN, whose code is 0
      from = (const uint8_t*)memcpy(few, from, (size_t)(left * item));
    }
    F x[VECTORS], low[VECTORS], step[VECTORS];
    load_tile(from, p.dtype, x);
    cursor.of_tile(job.low, low);
    cursor.of_tile(job.step, step);
    I code[VECTORS];
    EACH_VECTOR(v) {
      const F position = (x[v] - low[v]) / choose(step[v] > 0, step[v], splat(1.0f));
      const F u = STOCHASTIC ? __builtin_convertvector((I)numbers.complement(v), F) * splat(0x1p-16f) : splat(0.5f);
      code[v] = __builtin_convertvector(between(position + u, F{}, most), I);
    }
    uint8_t* const to = job.codes + tile * tile_bytes;
    if (left >= TILE) {
      pack_unsigned(code, p.bits, to);
    } else {
      pack_unsigned(code, p.bits, few);
      memcpy(to, few, (size_t)ceil_div(left * p.bits, 8));
    }
  }
}

// Codes tiles begin..end.
void affine_pack(const AffineJob& job, int64_t begin, int64_t end) {
  job.desc->stochastic ? affine_encode<true>(job, begin, end) : affine_encode<false>(job, begin, end);
}

void affine_unpack(const AffineJob& job, int64_t begin, int64_t end) {
  const AffineDesc& p = *job.desc;
  const int item = size_of(p.dtype), tile_bytes = TILE / 8 * p.bits;
  const uint8_t* const codes_end = job.codes + ceil_div(p.count * p.bits, 8);
  const F all = splat((float)(1 << p.bits));
  const Unpacker unpacker(p.bits);
  GroupCursor cursor(p, begin * TILE);
  for (int64_t tile = begin; tile < end; tile++, cursor.advance(TILE)) {
    const uint8_t* from = job.codes + tile * tile_bytes;
    uint8_t padded[TILE + 16];
    if (codes_end - from < tile_bytes + 16) {
      const int64_t left = codes_end - from;
      from = (const uint8_t*)memcpy(padded, from, (size_t)(left < tile_bytes ? left : tile_bytes));
    }
    F value[VECTORS], low[VECTORS], step[VECTORS];
    cursor.of_tile(job.low, low);
    cursor.of_tile(job.step, step);
    if (p.bits == 8) {
      EACH_VECTOR(v) value[v] = __builtin_convertvector(widened(from + v * LANES), F);
    } else {
      unpacker.tile(from, value);  // as signed codes
      EACH_VECTOR(v) value[v] += choose(value[v] < 0, all, F{});
    }
    EACH_VECTOR(v) value[v] = value[v] * step[v] + low[v];
    uint8_t* const to = (uint8_t*)job.values + tile * TILE * item;
    const int64_t left = p.count - tile * TILE;
    if (left >= TILE) {
      store_tile(to, p.dtype, value, false, false);
    } else {
      alignas(64) uint8_t few[TILE * 4];
      store_tile(few, p.dtype, value, false, false);
      memcpy(to, few, (size_t)(left * item));
    }
  }
}

}  // namespace
