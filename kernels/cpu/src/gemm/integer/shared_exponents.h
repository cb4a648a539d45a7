// Making panels of integers that share exponents: the mantissas and signs of scales are multiplied into the codes, and
// the blocks of a run brought to one exponent, where the integers have room for that. Both are exact.
#pragma once

#include "../../codec/formats/signed_steps.h"
#include "integer_packing.h"

namespace {

// Scale factors from 2^LEAST_MODERATE to 2^MAX_MODERATE are moderate: the product of any two is a normal number, and
// with panels of int16 still one when it is divided by that of the two largest.
template <bool int8> constexpr int LEAST_MODERATE = int8 ? -62 : -60;
template <bool int8> constexpr int MAX_MODERATE = int8 ? 63 : 3;

// The scales of a panel's vectors over its steps: an exponent for each block, and the factor by which its codes are to be
// multiplied.
struct Exponents {
  const IntegerOperand& packed;
  int vectors, blocks, block_size;
  int unit;                 // the power of two that a stored exponent of 0 stands for
  bool multiplied = false;  // some factor is not 1
  alignas(PANEL) uint8_t stored[VECTOR_ELEMENTS][PANEL];  // a block of every vector, then the next of every vector
  alignas(PANEL) int8_t factor[VECTOR_ELEMENTS][PANEL];

  Exponents(const IntegerOperand& x, int64_t vector, int64_t k, int steps)
      : packed(x), vectors(least(PANEL, x.vectors - vector)), blocks((int)ceil_div(steps, x.block_size)), block_size(x.block_size) {
    const int64_t next_vector = x.to_next_vector(), next_block = x.to_next_block();
    const uint8_t* from = x.exponents + vector * next_vector + k / x.block_size * next_block;
    memset(factor, 1, sizeof factor[0] * (size_t)blocks);
    unit = x.kind == POWER ? 2 - x.bits - 127 : x.tensor_exponent() - 127 - x.bits - 16;
    if (next_vector == 1) {
      for (int b = 0; b < blocks; b++)
        _mm256_store_si256((__m256i*)stored[b], _mm256_maskz_loadu_epi8(first32(vectors), from + b * next_block));
    } else {
      for (int first = 0; first < PANEL; first += 16)
        for (int at = 0; at < blocks; at += 16) {
          __m128i r[16];
          for (int i = 0; i < 16; i++) {
            const uint8_t* scales = from + (first + i) * next_vector;
            r[i] = first + i >= vectors ? __m128i()
                   : next_block ? _mm_maskz_loadu_epi8(first16(blocks - at), scales + at)
                              : _mm_set1_epi8((char)*scales);
          }
          transpose16_bytes(r);
          for (int b = 0; b < 16; b++) _mm_store_si128((__m128i*)(stored[at + b] + first), r[b]);
        }
    }
    if (x.folded) fold();
  }

  // Turns signed scales into factors, with sign and mantissa, and exponents: 0 where the step is 0.
  void fold() {
    multiplied = true;
    const __mmask32 nan = packed.tensor_exponent() == NAN_EXPONENT ? ~0u : 0;
    const __m256i one = _mm256_set1_epi8(1);
    for (int b = 0; b < blocks; b++) {
      const __m256i scale = _mm256_load_si256((const __m256i*)stored[b]);
      const __m256i size = _mm256_and_si256(scale, _mm256_set1_epi8(STEP_IS_NEGATIVE - 1));
      const __m256i field = _mm256_and_si256(_mm256_srli_epi16(size, 3), _mm256_set1_epi8(15));
      const __mmask32 normal = _mm256_test_epi8_mask(field, field), negative = _mm256_movepi8_mask(scale);
      __m256i mantissa = _mm256_and_si256(size, _mm256_set1_epi8(7));
      mantissa = _mm256_mask_add_epi8(mantissa, normal, mantissa, _mm256_set1_epi8(8));
      mantissa = _mm256_mask_sub_epi8(mantissa, negative, _mm256_setzero_si256(), mantissa);
      __m256i exponent = _mm256_mask_max_epu8(field, _mm256_test_epi8_mask(size, size), field, one);
      exponent = _mm256_mask_mov_epi8(exponent, nan, _mm256_set1_epi8((char)NAN_EXPONENT));
      _mm256_store_si256((__m256i*)stored[b], exponent);
      _mm256_store_si256((__m256i*)factor[b], mantissa);
    }
  }

  // Every vector's least exponent of blocks first..end - 1, and its largest.
  void range(int first, int end, __m256i& low, __m256i& high) const {
    low = high = _mm256_load_si256((const __m256i*)stored[first]);
    for (int b = first + 1; b < end; b++) {
      const __m256i here = _mm256_load_si256((const __m256i*)stored[b]);
      low = _mm256_min_epu8(low, here), high = _mm256_max_epu8(high, here);
    }
  }

  // Gives blocks of zeros, which may have any, their neighbors' exponents: their own, 0, would lie far below. A vector
  // of zeros takes the exponent of the scale 1. zeros(b): the vectors whose block b holds zeros.
  template <class Zeros> void pass_over_zeros(const Zeros& zeros) {
    auto take_from = [&](int b, __m256i there) {
      const __m256i here = _mm256_load_si256((const __m256i*)stored[b]);
      const __mmask32 candidates = _mm256_testn_epi8_mask(here, here) & first32(vectors);
      if (candidates) _mm256_store_si256((__m256i*)stored[b], _mm256_mask_mov_epi8(here, candidates & zeros(b), there));
    };
    auto of = [&](int b) { return _mm256_load_si256((const __m256i*)stored[b]); };
    for (int b = 1; b < blocks; b++) take_from(b, of(b - 1));
    take_from(blocks - 1, _mm256_set1_epi8((char)greatest(0, least(-unit, NAN_EXPONENT - 1))));
    for (int b = blocks - 2; b >= 0; b--) take_from(b, of(b + 1));
  }

  // Whether all scale factors are powers of two, and moderate.
  template <bool int8> bool moderate() const {
    __m256i low, high;
    range(0, blocks, low, high);
    const int from = greatest(LEAST_MODERATE<int8> - unit, 0), to = least(MAX_MODERATE<int8> - unit, NAN_EXPONENT - 1);
    if (from > to) return false;
    const __m256i least_stored = _mm256_set1_epi8((char)from), most_stored = _mm256_set1_epi8((char)to);
    const __mmask32 outside = _mm256_cmplt_epu8_mask(low, least_stored) | _mm256_cmpgt_epu8_mask(high, most_stored);
    return !(outside & first32(vectors));
  }

  // Brings the longest runs that it can to one exponent each: all steps, or RUN of them. Returns a run's steps.
  int share(int spare) {
    if (share_runs(STEPS<true> / block_size, spare)) return STEPS<true>;
    if (block_size < RUN && share_runs(RUN / block_size, spare)) return RUN;
    return block_size;
  }

  // Brings the blocks of each run to the least exponent among them, where integers have `spare` bits for that; a NaN's
  // block stays as it is.
  bool share_runs(int run, int spare) {
    __m256i low, high;
    for (int first = 0; first < blocks; first += run) {
      range(first, least(first + run, blocks), low, high);
      const __m256i nan = _mm256_set1_epi8((char)NAN_EXPONENT);
      if (_mm256_cmpgt_epu8_mask(_mm256_sub_epi8(high, low), _mm256_set1_epi8((char)spare))) return false;
      if (_mm256_cmpeq_epu8_mask(high, nan) & ~_mm256_cmpeq_epu8_mask(low, nan)) return false;
    }
    for (int first = 0; first < blocks; first += run) {
      const int end = least(first + run, blocks);
      range(first, end, low, high);
      for (int b = first; b < end; b++) {
        __m256i* const here = (__m256i*)stored[b];
        const __m256i by = _mm256_sub_epi8(_mm256_load_si256(here), low);
        _mm256_store_si256(here, low);
        if (_mm256_testz_si256(by, by)) continue;
        const __m512i factors = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)factor[b]));
        const __m512i shifted = _mm512_sllv_epi16(factors, _mm512_cvtepu8_epi16(by));
        _mm256_store_si256((__m256i*)factor[b], _mm512_cvtepi16_epi8(shifted));
        multiplied = true;
      }
    }
    return true;
  }

  // The scale factors of all blocks, each block's `stride` after the one before: those of signed scales that are not
  // folded, or powers of two; NaN where a block holds one. Any for vectors that are not there, whose codes are 0.
  void fill_scales(float* scales, int64_t stride) const {
    if (!packed.has_powers()) {
      const SignedSteps steps(packed.bits, packed.tensor_exponent());
      for (int b = 0; b < blocks; b++, scales += stride)
        for (int half = 0; half < PANEL; half += LANES) write(scales + half, steps.of(widened(stored[b] + half)));
      return;
    }
    for (int b = 0; b < blocks; b++, scales += stride)
      for (int half = 0; half < PANEL; half += 16) {
        const __m512i exponent = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(stored[b] + half)));
        const __m512 power = _mm512_cvtepi32_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(unit)));
        const __m512 step = _mm512_scalef_ps(_mm512_set1_ps(1), power), nan = _mm512_set1_ps(__builtin_nanf(""));
        const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(NAN_EXPONENT));
        _mm512_storeu_ps(scales + half, _mm512_mask_blend_ps(is_nan, step, nan));
      }
  }
};

// The vectors of A, or of B, whose codes in a block of `elements` are all zero.
inline __mmask32 zeros_of_a(const uint32_t* vectors, int index, int elements) {
  __mmask32 zeros = 0;
  for (int i = 0; i < PANEL; i++) {
    uint32_t any = 0;
    for (int e = 0; e < elements; e++) any |= vectors[i * VECTOR_ELEMENTS + index * elements + e];
    zeros |= (__mmask32)(any == 0) << i;
  }
  return zeros;
}
inline __mmask32 zeros_of_b(const uint32_t* panel, int index, int elements) {
  __m512i left = _mm512_setzero_si512(), right = left;
  for (int e = index * elements; e < (index + 1) * elements; e++) {
    left = _mm512_or_si512(left, _mm512_loadu_si512(panel + e * PANEL));
    right = _mm512_or_si512(right, _mm512_loadu_si512(panel + e * PANEL + 16));
  }
  return _mm512_testn_epi32_mask(left, left) | (__mmask32)_mm512_testn_epi32_mask(right, right) << 16;
}

// Codes times the factor in each 16-bit lane of `by`; products fit the codes' width.
template <bool int8> inline __m512i multiply_codes(__m512i codes, __m512i by) {
  const __m512i products = _mm512_mullo_epi16(codes, by);
  if constexpr (!int8) return products;
  const __m512i upper = _mm512_set1_epi16((short)0xff00);
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, products, _mm512_mullo_epi16(_mm512_and_si512(codes, upper), by));
}

// A's int8 codes as the microkernel reads them, times their factors: the instruction multiplies unsigned by signed, so
// codes go in 128 too large, and a run's dot product starts at -128 times the sum of B's codes over it.
void finish_a(const Exponents& x, uint32_t* vectors) {
  const __m512i offset = _mm512_set1_epi8((char)128);
  const __m512i lane = _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                                             16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
                                                             30, 31));
  const __m128i log2_box = _mm_cvtsi32_si128(__builtin_ctz((unsigned)x.block_size));
  const __m512i block_of_lane = _mm512_srl_epi16(_mm512_slli_epi16(lane, 1), log2_box);
  int8_t factors[PANEL][VECTOR_ELEMENTS + 32];
  for (int first = 0; x.multiplied && first < x.vectors; first += 16)
    for (int at = 0; at < x.blocks; at += 16) {
      __m128i r[16];
      for (int b = 0; b < 16; b++) r[b] = _mm_load_si128((const __m128i*)(x.factor[at + b] + first));
      transpose16_bytes(r);
      for (int i = 0; i < 16; i++) _mm_storeu_si128((__m128i*)(factors[first + i] + at), r[i]);
    }
  for (int i = 0; i < x.vectors; i++, vectors += VECTOR_ELEMENTS) {
    for (int at = 0; at < x.blocks * x.block_size; at += 64) {
      __m512i codes = _mm512_loadu_si512(vectors + at / 4);
      if (x.multiplied) {
        const __m512i blocks = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(factors[i] + at / x.block_size)));
        const __m512i by = _mm512_permutexvar_epi16(block_of_lane, blocks);
        codes = multiply_codes<true>(codes, by);
      }
      _mm512_storeu_si512(vectors + at / 4, _mm512_xor_si512(codes, offset));
    }
  }
}

template <bool int8> void multiply_b(const Exponents& x, uint32_t* panel) {
  for (int b = 0; b < x.blocks; b++) {
    __m512i by[2];
    for (int half = 0; half < 2; half++) {
      const __m512i factors = _mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)(x.factor[b] + 16 * half)));
      by[half] = _mm512_mask_blend_epi16(0xaaaaaaaa, factors, _mm512_slli_epi32(factors, 16));
    }
    for (int e = 0; e < x.block_size / PER_ELEMENT<int8>; e++)
      for (int half = 0; half < 2; half++, panel += 16)
        _mm512_storeu_si512(panel, multiply_codes<int8>(_mm512_loadu_si512(panel), by[half]));
  }
}

// 128 times the sum of each column's codes before each block, and after the last: a run's dot product starts at the entry
// of its first block less the entry after its last.
void fill_offsets(const uint32_t* panel, int blocks, int elements, int32_t* offsets) {
  __m512i left = _mm512_setzero_si512(), right = left;
  for (; blocks >= 0; blocks--, offsets += PANEL) {
    _mm512_storeu_si512(offsets, left);
    _mm512_storeu_si512(offsets + 16, right);
    for (int e = 0; blocks > 0 && e < elements; e++, panel += PANEL) {
      left = _mm512_dpbusd_epi32(left, _mm512_set1_epi8((char)128), _mm512_loadu_si512(panel));
      right = _mm512_dpbusd_epi32(right, _mm512_set1_epi8((char)128), _mm512_loadu_si512(panel + 16));
    }
  }
}

}  // namespace
