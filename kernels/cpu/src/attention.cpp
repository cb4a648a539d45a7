// Scaled dot-product attention and its gradients, computed in float32 on 512-bit units. The backward makes the weights
// again from q and k, as FlashAttention does (Dao et al. 2022). A block of queries sees all its keys at once: no sum has
// to be rescaled, and the backward needs neither the result nor the logarithms of the sums.
//
// A task is a head. S scores, P weights, O result; dO, dP, dS gradients. Rows in scratch memory are padded with zeros to
// whole vectors.
#include "attention.h"

#include "gemm/packing.h"
#include "threads.h"

namespace {

constexpr int LANES = 16;
constexpr int ROWS = 6, VECTORS = 4;       // of a register tile: 24 accumulators
constexpr int MOST_QUERIES = 16 * ROWS;    // of a block; causal attention leaves out keys block by block
constexpr int64_t BLOCK_SCORES = 1 << 16;  // of a block: 256 KiB

inline int64_t padded(int64_t n) { return ceil_div(n, LANES) * LANES; }
inline __mmask16 lanes_of(int64_t count) { return first16(least(count, LANES)); }

// ---- products ----

// A matrix whose element (row, column) is data[row * to_row + column * to_column].
struct Strided {
  const float* data;
  int64_t to_row, to_column;
};

// c (rows x 16 vectors) = a (rows x depth) b (depth x 16 vectors), added to what is there where `add`.
template <int rows, int vectors>
void attention_tile(Strided a, const float* b, int64_t b_stride, int64_t depth, float* c, int64_t c_stride, bool add) {
  __m512 sum[rows][vectors];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + v * LANES) : __m512{};
  for (int64_t k = 0; k < depth; k++, b += b_stride, a.data += a.to_column) {
    __m512 right[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) right[v] = _mm512_loadu_ps(b + v * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 left = _mm512_set1_ps(a.data[r * a.to_row]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_fmadd_ps(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + r * c_stride + v * LANES, sum[r][v]);
}

typedef void (*Tile)(Strided, const float*, int64_t, int64_t, float*, int64_t, bool);
template <int rows>
constexpr Tile TILES_OF[VECTORS] = {attention_tile<rows, 1>, attention_tile<rows, 2>, attention_tile<rows, 3>,
                                    attention_tile<rows, 4>};
constexpr const Tile* TILES[ROWS] = {TILES_OF<1>, TILES_OF<2>, TILES_OF<3>, TILES_OF<4>, TILES_OF<5>, TILES_OF<6>};

// c (rows x columns, whole vectors) = a b, or c + a b.
void multiply(int64_t rows, int64_t columns, int64_t depth, Strided a, const float* b, int64_t b_stride, float* c,
              int64_t c_stride, bool add = false) {
  for (int64_t j = 0; j < columns; j += VECTORS * LANES)
    for (int64_t i = 0; i < rows; i += ROWS) {
      const Tile of_size = TILES[least(rows - i, ROWS) - 1][least((columns - j) / LANES, VECTORS) - 1];
      of_size({a.data + i * a.to_row, a.to_row, a.to_column}, b + j, b_stride, depth, c + i * c_stride + j, c_stride, add);
    }
}

// ---- between a tensor's rows, of float or of bfloat16's bits, and scratch memory ----

inline __m512 loaded(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 loaded(const uint16_t* x, __mmask16 mask) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}
inline void stored(float* to, __mmask16 mask, __m512 x) { _mm512_mask_storeu_ps(to, mask, x); }
inline void stored(uint16_t* to, __mmask16 mask, __m512 x) {  // to nearest, ties to even; a NaN stays one
  const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}

template <class T> void copy_in(const T* x, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; i++, x += stride)
    for (int64_t k = 0; k < width; k += LANES, to += LANES) _mm512_storeu_ps(to, loaded(x + k, lanes_of(width - k)));
}

template <class T> void transpose_in(const T* x, int64_t stride, int64_t rows, int64_t width, float* to) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t k = 0; k < width; k += LANES) {
      __m512i r[LANES];
      for (int n = 0; n < LANES; n++)
        r[n] = i + n < rows ? (__m512i)loaded(x + (i + n) * stride + k, lanes_of(width - k)) : __m512i();
      transpose16(r);
      for (int n = 0; n < LANES && k + n < width; n++) _mm512_storeu_si512(to + (k + n) * padded(rows) + i, r[n]);
    }
}

template <class T> void copy_out(const float* x, int64_t rows, int64_t width, T* to, int64_t stride) {
  for (int64_t i = 0; i < rows; i++, to += stride)
    for (int64_t k = 0; k < width; k += LANES, x += LANES) stored(to + k, lanes_of(width - k), _mm512_loadu_ps(x));
}

// ---- softmax ----

// e^x for x <= 0, within 2 units in the last place.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110), x);  // e^-110 is 0; lower, r would not be small. A NaN stays one
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln 2 in two parts
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  constexpr float taylor[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1, 1};
  __m512 p = _mm512_set1_ps(1.f / 5040);
  for (float c : taylor) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

float largest(const float* s, int64_t count) {
  __m512 most = _mm512_set1_ps(-__builtin_inff());
  for (int64_t j = 0; j < count; j += LANES)
    most = _mm512_mask_max_ps(most, lanes_of(count - j), most, _mm512_loadu_ps(s + j));
  return _mm512_reduce_max_ps(most);
}

// e^(scale s - shift) in place of the first `count` of a row of scores, zeros from there to `end`. Returns the sum.
float exponentials(float* s, int64_t count, int64_t end, float scale, float shift) {
  __m512 sum{};
  for (int64_t j = 0; j < end; j += LANES) {
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + j), _mm512_set1_ps(scale));  // rounded, as the shift is
    const __m512 p = _mm512_maskz_mov_ps(lanes_of(count - j), exponential(_mm512_sub_ps(x, _mm512_set1_ps(shift))));
    _mm512_storeu_ps(s + j, p);
    sum = _mm512_add_ps(sum, p);
  }
  return _mm512_reduce_add_ps(sum);
}

// ---- a head ----

// How its queries are cut into blocks. Sizes are padded.
struct Blocks {
  int64_t keys, width, queries;
  explicit Blocks(const AttentionDesc& d) : keys(padded(d.keys)), width(padded(d.width)) {
    const int64_t fitting = BLOCK_SCORES / keys / ROWS * ROWS;
    queries = fitting < ROWS ? ROWS : fitting < MOST_QUERIES ? fitting : MOST_QUERIES;
  }
};

// The keys that query `i` sees.
inline int64_t seen(const AttentionDesc& d, int64_t i) { return d.causal && i + 1 < d.keys ? i + 1 : d.keys; }

// Divides scratch memory; without any, counts what it would take.
struct Pieces {
  float* memory;
  int64_t size = 0;
  float* take(int64_t more) {
    size += more;
    return memory ? memory + size - more : nullptr;
  }
};

template <class T> T* rows_of(address data, const HeadStrides& strides, int64_t batch, int64_t head) {
  return (T*)data + batch * strides.batch + head * strides.head;
}

// Returns the floats that it takes of `memory`; without memory it does nothing else.
template <class T> int64_t forward_head(const AttentionDesc& d, const AttentionTensors& t, int64_t batch, int64_t head,
                                        float* memory) {
  const Blocks blocks(d);
  const int64_t keys = blocks.keys, width = blocks.width;
  Pieces pieces{memory};
  float *kt = pieces.take(keys * width), *v = pieces.take(keys * width), *q = pieces.take(blocks.queries * width),
        *s = pieces.take(blocks.queries * keys), *o = q;
  if (!memory) return pieces.size;
  const T* const q_rows = rows_of<T>(t.q, d.q, batch, head);
  T* const o_rows = rows_of<T>(t.o, d.o, batch, head);
  float* const lse = rows_of<float>(t.lse, d.lse, batch, head);
  transpose_in(rows_of<T>(t.k, d.k, batch, head), d.k.row, d.keys, d.width, kt);
  copy_in(rows_of<T>(t.v, d.v, batch, head), d.v.row, d.keys, d.width, v);
  for (int64_t first = 0; first < d.queries; first += blocks.queries) {
    const int64_t rows = least(d.queries - first, blocks.queries), last = seen(d, first + rows - 1);
    copy_in(q_rows + first * d.q.row, d.q.row, rows, d.width, q);
    multiply(rows, padded(last), d.width, {q, width, 1}, kt, keys, s, keys);
    float sums[MOST_QUERIES];
    for (int64_t i = 0; i < rows; i++) {
      const int64_t count = seen(d, first + i);
      const float most = largest(s + i * keys, count) * d.scale;
      sums[i] = exponentials(s + i * keys, count, padded(last), d.scale, most);
      lse[(first + i) * d.lse.row] = most + __builtin_logf(sums[i]);
    }
    multiply(rows, width, last, {s, keys, 1}, v, width, o, width);
    for (int64_t i = 0; i < rows; i++)
      for (float* x = o + i * width; x < o + (i + 1) * width; x += LANES)
        _mm512_storeu_ps(x, _mm512_div_ps(_mm512_loadu_ps(x), _mm512_set1_ps(sums[i])));
    copy_out(o, rows, d.width, o_rows + first * d.o.row, d.o.row);
  }
  return pieces.size;
}

// Likewise.
template <class T> int64_t backward_head(const AttentionDesc& d, const AttentionTensors& t, int64_t batch, int64_t head,
                                         float* memory) {
  const Blocks blocks(d);
  const int64_t keys = blocks.keys, width = blocks.width;
  Pieces pieces{memory};
  float *dk = pieces.take(keys * width), *dv = pieces.take(keys * width), *kt = pieces.take(keys * width),
        *vt = pieces.take(keys * width), *k = pieces.take(keys * width), *q = pieces.take(blocks.queries * width),
        *d_o = pieces.take(blocks.queries * width), *dq = pieces.take(blocks.queries * width),
        *p = pieces.take(blocks.queries * keys), *ds = pieces.take(blocks.queries * keys);
  if (!memory) return pieces.size;
  const T *const q_rows = rows_of<T>(t.q, d.q, batch, head), *const k_rows = rows_of<T>(t.k, d.k, batch, head);
  const T* const do_rows = rows_of<T>(t.d_o, d.d_o, batch, head);
  T* const dq_rows = rows_of<T>(t.dq, d.dq, batch, head);
  transpose_in(k_rows, d.k.row, d.keys, d.width, kt);
  transpose_in(rows_of<T>(t.v, d.v, batch, head), d.v.row, d.keys, d.width, vt);
  copy_in(k_rows, d.k.row, d.keys, d.width, k);
  memset(dk, 0, (size_t)(8 * keys * width));  // and dv
  for (int64_t first = 0; first < d.queries; first += blocks.queries) {
    const int64_t rows = least(d.queries - first, blocks.queries), last = seen(d, first + rows - 1);
    copy_in(q_rows + first * d.q.row, d.q.row, rows, d.width, q);
    copy_in(do_rows + first * d.d_o.row, d.d_o.row, rows, d.width, d_o);
    multiply(rows, padded(last), d.width, {q, width, 1}, kt, keys, p, keys);
    multiply(rows, padded(last), d.width, {d_o, width, 1}, vt, keys, ds, keys);  // dP
    for (int64_t i = 0; i < rows; i++) {
      float *const p_row = p + i * keys, *const ds_row = ds + i * keys;
      const int64_t count = seen(d, first + i), end = padded(last);
      const float sum = exponentials(p_row, count, end, d.scale, largest(p_row, count) * d.scale);
      __m512 products{};
      for (int64_t j = 0; j < end; j += LANES) {
        const __m512 weight = _mm512_div_ps(_mm512_loadu_ps(p_row + j), _mm512_set1_ps(sum));
        _mm512_storeu_ps(p_row + j, weight);
        products = _mm512_fmadd_ps(weight, _mm512_loadu_ps(ds_row + j), products);
      }
      const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(products));  // the sum of P dP, which is dO . O
      for (int64_t j = 0; j < end; j += LANES) {
        const __m512 dp = _mm512_sub_ps(_mm512_loadu_ps(ds_row + j), mean);
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(p_row + j), _mm512_set1_ps(d.scale));
        _mm512_storeu_ps(ds_row + j, _mm512_mul_ps(scaled, dp));
      }
    }
    multiply(rows, width, last, {ds, keys, 1}, k, width, dq, width);
    copy_out(dq, rows, d.width, dq_rows + first * d.dq.row, d.dq.row);
    multiply(last, width, rows, {ds, 1, keys}, q, width, dk, width, true);
    multiply(last, width, rows, {p, 1, keys}, d_o, width, dv, width, true);
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

}  // namespace

bool attention_usable() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

int64_t attention_scratch(const AttentionDesc& desc, bool backward) {
  return (backward ? backward_head<float> : forward_head<float>)(desc, {}, 0, 0, nullptr);
}

void attention_forward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads) {
  if (desc.dtype == FLOAT32) each_head<forward_head<float>>(desc, tensors, scratch, threads);
  else each_head<forward_head<uint16_t>>(desc, tensors, scratch, threads);
}

void attention_backward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads) {
  if (desc.dtype == FLOAT32) each_head<backward_head<float>>(desc, tensors, scratch, threads);
  else each_head<backward_head<uint16_t>>(desc, tensors, scratch, threads);
}
