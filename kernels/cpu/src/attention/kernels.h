// Scaled dot-product attention and its gradients, computed in float32. The backward recomputes the weights from q and k,
// as FlashAttention does (Dao et al. 2022). A block of queries sees all its keys at once: no sum has to be rescaled,
// and the backward needs neither the result nor the logarithms of the sums. A file defines LANES and includes this.
//
// A task is a head. S scores, P weights, O result; dO, dP, dS gradients. Rows in scratch memory are padded with zeros to
// whole vectors.
#pragma once

#include "../simd/lanes.h"
#include "../threads.h"
#include "attention.h"

namespace {

// A register tile: as many accumulators as leave room for a row of the right operand and a value of the left.
constexpr int ROWS = 6, VECTORS = LANES == 16 ? 4 : 2;
constexpr int MAX_QUERIES = 16 * ROWS;    // of a block; causal attention leaves out keys block by block
constexpr int64_t BLOCK_SCORES = 1 << 16;  // of a block: 256 KiB

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t padded(int64_t n) { return ceil_div(n, LANES) * LANES; }
// From a row of n values to the next in scratch memory: an odd number of cache lines, so that a column's values do not
// all fall into the same few sets of the cache.
inline int64_t stride_of(int64_t n) { return ceil_div(n, 16) * 16 | 16; }

// a b + c, rounded once.
INLINE F multiply_add(F a, F b, F c) {
#if LANES == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

// ---- products ----

// A matrix whose element (row, column) is data[row * to_row + column * to_column].
struct Strided {
  const float* data;
  int64_t to_row, to_column;
};

// c (rows x columns) = a (rows x depth) b (depth x columns), added to c if `add`.
template <int rows, int vectors>
void attention_tile(Strided a, const float* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride, bool add) {
  F sum[rows][vectors];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[r][v] = add ? load(c + r * c_stride + v * LANES) : F{};
  for (int64_t k = 0; k < depth; k++, b += b_stride, a.data += a.to_column) {
    F right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const F left = splat(a.data[r * a.to_row]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[r][v] = multiply_add(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
}

typedef void (*Tile)(Strided, const float*, int64_t, int64_t, float*, int64_t, bool);
#if LANES == 16
#define TILES_OF(rows) \
  { attention_tile<rows, 1>, attention_tile<rows, 2>, attention_tile<rows, 3>, attention_tile<rows, 4> }
#else
#define TILES_OF(rows) \
  { attention_tile<rows, 1>, attention_tile<rows, 2> }
#endif
constexpr Tile TILES[ROWS][VECTORS] = {TILES_OF(1), TILES_OF(2), TILES_OF(3), TILES_OF(4), TILES_OF(5), TILES_OF(6)};

// c (rows x columns, whole vectors) = a b, or c + a b.
void multiply(int64_t rows, int64_t columns, int64_t depth, Strided a, const float* b, int64_t b_stride, float* c,
              int64_t c_stride, bool add = false) {
  for (int64_t j = 0; j < columns; j += VECTORS * LANES)
    for (int64_t i = 0; i < rows; i += ROWS) {
      const Tile of_size = TILES[least(rows - i, ROWS) - 1][least((columns - j) / LANES, VECTORS) - 1];
      of_size({a.data + i * a.to_row, a.to_row, a.to_column}, b + j, b_stride, depth, c + i * c_stride + j, c_stride, add);
    }
}

// ---- between a tensor's rows, of float or of bfloat16, and scratch memory ----

INLINE void store(bf16* p, F x) {  // a NaN stays one
  const U rounded = round_to_bf16((U)x) >> 16;
  write(p, __builtin_convertvector((U)choose(x == x, (I)rounded, splat(0x7fc0)), U16));
}

INLINE F load(const uint8_t* p) { return __builtin_convertvector(widened(p), F); }

// The first `count` values at x, then zeros.
template <class T> INLINE F load_some(const T* x, int64_t count) {
  if (count >= LANES) return load(x);
  T some[LANES] = {};
  for (int i = 0; i < count; i++) some[i] = x[i];
  return load(some);
}

template <class T> INLINE void store_some(T* to, F x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T some[LANES];
  store(some, x);
  for (int i = 0; i < count; i++) to[i] = some[i];
}

template <class T> void copy_in(const T* x, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; i++, x += stride, to += stride_of(width))
    for (int64_t k = 0; k < width; k += LANES) store(to + k, load_some(x + k, width - k));
}

template <class T> void transpose_in(const T* x, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t k = 0; k < width; k += LANES) {
      F r[LANES];
      for (int n = 0; n < LANES; n++) r[n] = i + n < rows ? load_some(x + (i + n) * stride + k, width - k) : F{};
      transpose(r);
      for (int n = 0; n < LANES && k + n < width; n++) store(to + (k + n) * stride_of(rows) + i, r[n]);
    }
}

template <class T> void copy_out(const float* x, int64_t rows, int64_t width, T* to, int64_t stride) {
  for (int64_t i = 0; i < rows; i++, x += stride_of(width), to += stride)
    for (int64_t k = 0; k < width; k += LANES) store_some(to + k, load(x + k), width - k);
}

// ---- softmax ----

// p 2^n for a whole n in [-160, 0].
INLINE F scaled(F p, F n) {
#if LANES == 16
  return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const I whole = nearest(n), half = whole >> 1;  // 2^n may be subnormal; neither of two factors is
  return p * (F)((half + 127) << 23) * (F)((whole - half + 127) << 23);
#endif
}

// e^x for x <= 0, within 2 units in the last place.
INLINE F exponential(F x) {
  x = larger(splat(-110.f), x);  // e^-110 is 0; lower, r would not be small. A NaN stays one
#if LANES == 16
  const F n = (F)_mm512_roundscale_ps((__m512)(x * splat(1.44269504f)), 0);
#else
  const F n = (F)_mm256_round_ps((__m256)(x * splat(1.44269504f)), 0);
#endif
  F r = multiply_add(n, splat(-0.693359375f), x);  // ln 2 in two parts
  r = multiply_add(n, splat(2.12194440e-4f), r);
  constexpr float taylor[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1, 1};
  F p = splat(1.f / 5040);
  for (float c : taylor) p = multiply_add(p, r, splat(c));
  return scaled(p, n);
}

// All lanes put together, the halves of a vector first.
template <class Fold> INLINE float folded(F x, const Fold& fold) {
  float lane[LANES];
  store(lane, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = fold(lane[i], lane[i + half]);
  return lane[0];
}
INLINE float sum_of(F x) {
  return folded(x, [](float a, float b) ALWAYS { return a + b; });
}

// Of a row of `end` scores, of which a query sees the first `count`: the others become e^... = 0. Returns the largest.
float largest_seen(float* s, int64_t count, int64_t end) {
  for (int64_t j = count; j < end; j++) s[j] = -__builtin_inff();
  F most = load(s);
  for (int64_t j = LANES; j < end; j += LANES) most = larger(most, load(s + j));
  return folded(most, [](float a, float b) ALWAYS { return a > b ? a : b; });
}

// e^(scale s - shift) in place of a row of scores. Returns the sum.
float exponentials(float* s, int64_t end, float scale, float shift) {
  F sum{};
  for (int64_t j = 0; j < end; j += LANES) {
    const F x = load(s + j) * splat(scale);  // rounded, as the shift is
    const F p = exponential(x - splat(shift));
    store(s + j, p);
    sum += p;
  }
  return sum_of(sum);
}

// e^(score - most) in place of a row of scores, of which a query sees the first `count`: scores times `scale`, to which a
// row of the mask is added if there is one. Returns the sum; 0 where nothing is seen.
float weights(float* s, const float* mask, int64_t count, int64_t keys, int64_t end, float scale, float* most) {
  if (mask) {
    for (int64_t j = 0; j < keys; j += LANES)
      store(s + j, load(s + j) * splat(scale) + load_some(mask + j, keys - j));
    scale = 1;
  }
  *most = largest_seen(s, count, end) * scale;
  return exponentials(s, end, scale, *most == -__builtin_inff() ? 0 : *most);
}

// x after dropout: times `kept`, or 0.
INLINE F dropped(F x, const uint8_t* noise, int64_t count, float kept) {
  return x * splat(kept) * load_some(noise, count);
}

// ---- a head ----

// How its queries are cut into blocks; `keys` and `width` are strides of rows.
struct Blocks {
  int64_t keys, width, queries;
  explicit Blocks(const AttentionDesc& d) : keys(stride_of(d.keys)), width(stride_of(d.width)) {
    const int64_t fitting = BLOCK_SCORES / keys / ROWS * ROWS;
    queries = fitting < ROWS ? ROWS : fitting < MAX_QUERIES ? fitting : MAX_QUERIES;
  }
};

// The keys that query `i` sees.
inline int64_t seen(const AttentionDesc& d, int64_t i) { return d.causal && i + 1 < d.keys ? i + 1 : d.keys; }

// Divides scratch memory; if it is null, counts the bytes needed.
struct Pieces {
  float* memory;
  int64_t size = 0;
  float* take(int64_t more) {
    size += more;
    return memory ? memory + size - more : nullptr;
  }
};

// Null where there is no such tensor; its strides are then 0.
template <class T> T* rows_of(address data, const HeadStrides& strides, int64_t batch, int64_t head) {
  return data ? (T*)data + batch * strides.batch + head * strides.head : nullptr;
}

// Returns the floats that it takes of `memory`; without memory it does nothing else.
template <class T> int64_t forward_head(const AttentionDesc& d, const AttentionTensors& t, int64_t batch, int64_t head,
                                        float* memory) {
  const Blocks blocks(d);
  const int64_t keys = blocks.keys, width = blocks.width, features = padded(d.width);
  Pieces pieces{memory};
  float *kt = pieces.take(d.width * keys), *v = pieces.take(d.keys * width), *q = pieces.take(blocks.queries * width),
        *s = pieces.take(blocks.queries * keys), *o = q;
  if (!memory) return pieces.size;
  const T* const q_rows = rows_of<T>(t.q, d.q, batch, head);
  T* const o_rows = rows_of<T>(t.o, d.o, batch, head);
  float* const lse = rows_of<float>(t.lse, d.lse, batch, head);
  const float* const mask_rows = rows_of<float>(t.mask, d.mask, batch, head);
  const uint8_t* const noise_rows = rows_of<uint8_t>(t.noise, d.noise, batch, head);
  transpose_in(rows_of<T>(t.k, d.k, batch, head), d.k.row, d.keys, d.width, kt);
  copy_in(rows_of<T>(t.v, d.v, batch, head), d.v.row, d.keys, d.width, v);
  for (int64_t first = 0; first < d.queries; first += blocks.queries) {
    const int64_t rows = least(d.queries - first, blocks.queries), last = seen(d, first + rows - 1);
    copy_in(q_rows + first * d.q.row, d.q.row, rows, d.width, q);
    multiply(rows, padded(last), d.width, {q, width, 1}, kt, keys, s, keys);
    float sums[MAX_QUERIES];
    for (int64_t i = 0; i < rows; i++) {
      const int64_t query = first + i, end = padded(last);
      float most, *const row = s + i * keys;
      sums[i] = weights(row, mask_rows + query * d.mask.row, seen(d, query), d.keys, end, d.scale, &most);
      if (lse) lse[query * d.lse.row] = most + __builtin_logf(sums[i]);
      if (sums[i] == 0) sums[i] = 1;  // of a row without a key, whose result is 0
      for (int64_t j = 0; noise_rows && j < end; j += LANES)
        store(row + j, dropped(load(row + j), noise_rows + query * d.noise.row + j, d.keys - j, d.kept));
    }
    multiply(rows, features, last, {s, keys, 1}, v, width, o, width);
    for (int64_t i = 0; i < rows; i++)
      for (float* x = o + i * width; x < o + i * width + features; x += LANES) store(x, load(x) / splat(sums[i]));
    copy_out(o, rows, d.width, o_rows + first * d.o.row, d.o.row);
  }
  return pieces.size;
}

// Likewise.
template <class T> int64_t backward_head(const AttentionDesc& d, const AttentionTensors& t, int64_t batch, int64_t head,
                                         float* memory) {
  const Blocks blocks(d);
  const int64_t keys = blocks.keys, width = blocks.width, features = padded(d.width);
  Pieces pieces{memory};
  float *dk = pieces.take(d.keys * width), *dv = pieces.take(d.keys * width), *kt = pieces.take(d.width * keys),
        *vt = pieces.take(d.width * keys), *k = pieces.take(d.keys * width), *q = pieces.take(blocks.queries * width),
        *d_o = pieces.take(blocks.queries * width), *dq = pieces.take(blocks.queries * width),
        *p = pieces.take(blocks.queries * keys), *ds = pieces.take(blocks.queries * keys);
  if (!memory) return pieces.size;
  const T *const q_rows = rows_of<T>(t.q, d.q, batch, head), *const k_rows = rows_of<T>(t.k, d.k, batch, head);
  const T* const do_rows = rows_of<T>(t.d_o, d.d_o, batch, head);
  T* const dq_rows = rows_of<T>(t.dq, d.dq, batch, head);
  const float* const mask_rows = rows_of<float>(t.mask, d.mask, batch, head);
  float* const d_mask_rows = rows_of<float>(t.d_mask, d.d_mask, batch, head);
  const uint8_t* const noise_rows = rows_of<uint8_t>(t.noise, d.noise, batch, head);
  transpose_in(k_rows, d.k.row, d.keys, d.width, kt);
  transpose_in(rows_of<T>(t.v, d.v, batch, head), d.v.row, d.keys, d.width, vt);
  copy_in(k_rows, d.k.row, d.keys, d.width, k);
  memset(dk, 0, (size_t)(8 * d.keys * width));  // and dv
  for (int64_t first = 0; first < d.queries; first += blocks.queries) {
    const int64_t rows = least(d.queries - first, blocks.queries), last = seen(d, first + rows - 1);
    copy_in(q_rows + first * d.q.row, d.q.row, rows, d.width, q);
    copy_in(do_rows + first * d.d_o.row, d.d_o.row, rows, d.width, d_o);
    multiply(rows, padded(last), d.width, {q, width, 1}, kt, keys, p, keys);
    multiply(rows, padded(last), d.width, {d_o, width, 1}, vt, keys, ds, keys);  // dP
    for (int64_t i = 0; i < rows; i++) {
      float *const p_row = p + i * keys, *const ds_row = ds + i * keys;
      const int64_t end = padded(last);
      const int64_t query = first + i;
      float most;
      const float sum = weights(p_row, mask_rows + query * d.mask.row, seen(d, query), d.keys, end, d.scale, &most);
      const F part = splat(sum == 0 ? 0 : 1 / sum);
      const uint8_t* const noise = noise_rows + query * d.noise.row;
      const auto left = [&](F x, int64_t j) ALWAYS { return noise ? dropped(x, noise + j, d.keys - j, d.kept) : x; };
      F products{};
      for (int64_t j = 0; j < end; j += LANES) {
        const F weight = load(p_row + j) * part, dp = left(load(ds_row + j), j);
        store(p_row + j, weight);
        store(ds_row + j, dp);
        products = multiply_add(weight, dp, products);
      }
      const F mean = splat(sum_of(products));  // the sum of P dP, which is dO . O
      for (int64_t j = 0; j < end; j += LANES) {
        const F weight = load(p_row + j), changed = load(ds_row + j) - mean;
        store(ds_row + j, weight * splat(d.scale) * changed);
        store(p_row + j, left(weight, j));
        if (d_mask_rows) store_some(d_mask_rows + query * d.d_mask.row + j, weight * changed, d.keys - j);
      }
    }
    multiply(rows, features, last, {ds, keys, 1}, k, width, dq, width);
    copy_out(dq, rows, d.width, dq_rows + first * d.dq.row, d.dq.row);
    multiply(last, features, rows, {ds, 1, keys}, q, width, dk, width, true);
    multiply(last, features, rows, {p, 1, keys}, d_o, width, dv, width, true);
  }
  copy_out(dk, d.keys, d.width, rows_of<T>(t.dk, d.dk, batch, head), d.dk.row);
  copy_out(dv, d.keys, d.width, rows_of<T>(t.dv, d.dv, batch, head), d.dv.row);
  return pieces.size;
}

template <auto pass> void each_head(const AttentionDesc& d, const AttentionTensors& t, float* memory, int threads) {
  const int64_t room = pass(d, t, 0, 0, nullptr);
  parallel_for(d.batches * d.heads, threads, [&](int64_t i) {
    const int thread = threads > 1 && openmp_thread_number ? openmp_thread_number() : 0;
    pass(d, t, i / d.heads, i % d.heads, memory + thread * room);
  });
}

int64_t attention_scratch(const AttentionDesc& desc, bool backward) {
  return (backward ? backward_head<float> : forward_head<float>)(desc, {}, 0, 0, nullptr);
}

void attention_forward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads) {
  if (desc.dtype == FLOAT32) each_head<forward_head<float>>(desc, tensors, scratch, threads);
  else each_head<forward_head<bf16>>(desc, tensors, scratch, threads);
}

void attention_backward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads) {
  if (desc.dtype == FLOAT32) each_head<backward_head<float>>(desc, tensors, scratch, threads);
  else each_head<backward_head<bf16>>(desc, tensors, scratch, threads);
}

constexpr AttentionKernels kernels_of(const char* name, bool (*usable)()) {
  return {name, usable, attention_scratch, attention_forward, attention_backward};
}

}  // namespace
