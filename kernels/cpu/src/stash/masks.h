// Masks of one bit a value: packing (whether the value is between the limits), unpacking to 0 and 1, masking of other
// values, and ReLU, which computes the result and its mask at once.
#pragma once

#include "../simd/lanes.h"

namespace {

// A bit a lane, the lowest first: the sign bits of a.
INLINE uint32_t sign_bits(I a) {
#if LANES == 16
  return _mm512_movepi32_mask((__m512i)a);
#elif LANES == 8
  return (uint32_t)_mm256_movemask_ps((__m256)a);
#elif defined DSQ_X86
  return (uint32_t)_mm_movemask_ps((__m128)a);
#elif defined __aarch64__
  const int32x4_t place = {0, 1, 2, 3};
  return vaddvq_u32(vshlq_u32(vshrq_n_u32((uint32x4_t)a, 31), place));
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= (uint32_t)a[i] >> 31 << i;
  return bits;
#endif
}

// The low bits of `bits`, each as all the bits of a lane.
INLINE I lane_masks(uint32_t bits) {
#if LANES == 16
  return (I)_mm512_movm_epi32((__mmask16)bits);
#else
  I bit;
  for (int i = 0; i < LANES; i++) bit[i] = 1 << i;
  return (splat((int32_t)bits) & bit) != 0;
#endif
}

constexpr int WORD = 32;  // values that are worked on at a time: four bytes of bits

struct Sides {
  F low, high;
  bool nan_is_open;

  template <class T> INLINE uint32_t word(const T* x) const {
    uint32_t bits = 0;
    for (int i = 0; i < WORD; i += LANES) {
      const F value = load(x + i);
      I open = ~((value <= low) | (value >= high));
      if (!nan_is_open) open &= value == value;
      bits |= sign_bits(open) << i;
    }
    return bits;
  }
  // Eight bytes of 0 or 1: the product has their bits in its top byte.
  INLINE uint32_t word(const uint8_t* x) const {
    uint32_t bits = 0;
    for (int i = 0; i < WORD; i += 8) bits |= (uint32_t)(read<uint64_t>(x + i) * 0x0102040810204080 >> 56) << i;
    return bits;
  }
};

template <class T> void mask_values(const Sides& sides, const T* x, int64_t begin, int64_t end, uint8_t* bits) {
  for (; begin + WORD <= end; begin += WORD) write(bits + begin / 8, sides.word(x + begin));
  if (begin == end) return;
  T few[WORD] = {};
  memcpy(few, x + begin, (size_t)(end - begin) * sizeof(T));
  const uint32_t word = sides.word(few) & ((1u << (end - begin)) - 1);
  memcpy(bits + begin / 8, &word, (size_t)(end - begin + 7) / 8);
}

void mask(const MaskJob& job, int64_t begin, int64_t end) {
  const Sides sides{splat(job.low), splat(job.high), job.nan_is_open};
  switch (job.dtype) {
    case FLOAT32: return mask_values(sides, (const float*)job.values, begin, end, job.bits);
    case BFLOAT16: return mask_values(sides, (const bf16*)job.values, begin, end, job.bits);
    case FLOAT16: return mask_values(sides, (const half*)job.values, begin, end, job.bits);
    case BYTE: return mask_values(sides, (const uint8_t*)job.values, begin, end, job.bits);
  }
}

// A word's bits as the numbers 0 and `one`; both are bit patterns of floats.
INLINE void spread(uint32_t bits, int32_t one, uint32_t* out) {
  for (int i = 0; i < WORD; i += LANES) write(out + i, lane_masks(bits >> i) & splat(one));
}
INLINE void spread(uint32_t bits, int32_t one, uint16_t* out) {
  for (int i = 0; i < WORD; i += LANES)
    write(out + i, __builtin_convertvector((U)(lane_masks(bits >> i) & splat(one)), U16));
}

template <class T> void unmask_values(const MaskJob& job, int32_t one, int64_t begin, int64_t end) {
  T* const out = (T*)job.values;
  for (; begin + WORD <= end; begin += WORD) {
    prefetch<3, true>((uintptr_t)(out + begin) + PAGE, sizeof(T[WORD]));
    spread(read<uint32_t>(job.bits + begin / 8), one, out + begin);
  }
  for (; begin < end; begin++) out[begin] = job.bits[begin / 8] >> begin % 8 & 1 ? (T)one : 0;
}

void unmask(const MaskJob& job, int64_t begin, int64_t end) {
  switch (job.dtype) {
    case FLOAT32: return unmask_values<uint32_t>(job, 0x3f800000, begin, end);
    case BFLOAT16: return unmask_values<uint16_t>(job, 0x3f80, begin, end);
    case FLOAT16: return unmask_values<uint16_t>(job, 0x3c00, begin, end);
  }
}

INLINE void let_through(uint32_t bits, const uint32_t* x, uint32_t* out) {
  for (int i = 0; i < WORD; i += LANES) write(out + i, read<I>(x + i) & lane_masks(bits >> i));
}
INLINE void let_through(uint32_t bits, const uint16_t* x, uint16_t* out) {
  for (int i = 0; i < WORD; i += LANES)
    write(out + i, (I16)(read<I16>(x + i) & __builtin_convertvector(lane_masks(bits >> i), I16)));
}

template <class T> void apply_to_values(const MaskJob& job, int64_t begin, int64_t end) {
  const T* const x = (const T*)job.source;
  T* const out = (T*)job.values;
  for (; begin + WORD <= end; begin += WORD) {
    prefetch<3>((uintptr_t)(x + begin) + PAGE, sizeof(T[WORD]));
    prefetch<3, true>((uintptr_t)(out + begin) + PAGE, sizeof(T[WORD]));
    let_through(read<uint32_t>(job.bits + begin / 8), x + begin, out + begin);
  }
  for (; begin < end; begin++) out[begin] = job.bits[begin / 8] >> begin % 8 & 1 ? x[begin] : 0;
}

// The factor where the bit is 1, else 0.
INLINE F factors(uint32_t bits, float factor) { return (F)(lane_masks(bits) & (I)splat(factor)); }

// Two vectors in 16 bits; a NaN stays one.
INLINE void store_pair(bf16* out, F a, F b) {
  const auto rounded = [](F x) ALWAYS { return round_to_bf16((U)choose(x == x, x, splat(__builtin_nanf("")))); };
  write(out, upper_halves(rounded(a), rounded(b)));
}
INLINE void store_pair(half* out, F a, F b) { write(out, upper_halves(half_bits(a) << 16, half_bits(b) << 16)); }
INLINE void store_pair(float* out, F a, F b) { store(out, a), store(out + LANES, b); }

template <class T> INLINE void scale_word(uint32_t bits, float factor, const T* x, T* out) {
  for (int i = 0; i < WORD; i += 2 * LANES) {
    const F low = load(x + i) * factors(bits >> i, factor), high = load(x + i + LANES) * factors(bits >> (i + LANES), factor);
    store_pair(out + i, low, high);
  }
}

template <class T> void scale_values(const MaskJob& job, int64_t begin, int64_t end) {
  const T* const x = (const T*)job.source;
  T* const out = (T*)job.values;
  for (; begin + WORD <= end; begin += WORD) {
    prefetch<3>((uintptr_t)(x + begin) + PAGE, sizeof(T[WORD]));
    prefetch<3, true>((uintptr_t)(out + begin) + PAGE, sizeof(T[WORD]));
    scale_word(read<uint32_t>(job.bits + begin / 8), job.factor, x + begin, out + begin);
  }
  if (begin == end) return;
  T few[WORD] = {};
  uint32_t bits = 0;
  memcpy(few, x + begin, (size_t)(end - begin) * sizeof(T));
  memcpy(&bits, job.bits + begin / 8, (size_t)(end - begin + 7) / 8);
  scale_word(bits, job.factor, few, few);
  memcpy(out + begin, few, (size_t)(end - begin) * sizeof(T));
}

void scale_mask(const MaskJob& job, int64_t begin, int64_t end) {
  switch (job.dtype) {
    case FLOAT32: return scale_values<float>(job, begin, end);
    case BFLOAT16: return scale_values<bf16>(job, begin, end);
    case FLOAT16: return scale_values<half>(job, begin, end);
  }
}

// As PyTorch's: -0 stays -0, and a NaN itself.
INLINE uint32_t rectify(const float* x, float* y) {
  uint32_t bits = 0;
  for (int i = 0; i < WORD; i += LANES) {
    const F value = load(x + i);
    write(y + i, choose(~(value < 0), value, F{}));
    bits |= sign_bits(~(value <= 0)) << i;
  }
  return bits;
}

void relu(const MaskJob& job, int64_t begin, int64_t end) {
  const float* const x = (const float*)job.source;
  float* const y = (float*)job.values;
  for (; begin + WORD <= end; begin += WORD) {
    prefetch<3>((uintptr_t)(x + begin) + PAGE, sizeof(float[WORD]));
    prefetch<3, true>((uintptr_t)(y + begin) + PAGE, sizeof(float[WORD]));
    write(job.bits + begin / 8, rectify(x + begin, y + begin));
  }
  if (begin == end) return;
  float few[WORD] = {};
  memcpy(few, x + begin, (size_t)(end - begin) * sizeof(float));
  const uint32_t word = rectify(few, few);
  memcpy(y + begin, few, (size_t)(end - begin) * sizeof(float));
  memcpy(job.bits + begin / 8, &word, (size_t)(end - begin + 7) / 8);
}

void apply_mask(const MaskJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) apply_to_values<uint32_t>(job, begin, end);
  else apply_to_values<uint16_t>(job, begin, end);
}

}  // namespace
