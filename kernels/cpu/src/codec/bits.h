// Codes to and from bitstreams: little-endian, `bits` to a code, two's complement.
#pragma once

#include "tile.h"

namespace {

// ---- a tile's codes, one in each 32-bit lane, as whole bytes or pairs of them, in order ----

INLINE void narrow(const I code[VECTORS], int16_t out[TILE]) {
#if LANES == 16
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  for (int i = 0; i < VECTORS; i += 2)
    write(out + 16 * i, _mm512_permutexvar_epi64(order, _mm512_packs_epi32((__m512i)code[i], (__m512i)code[i + 1])));
#elif LANES == 8
  for (int i = 0; i < VECTORS; i += 2)
    write(out + 8 * i, _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)code[i], (__m256i)code[i + 1]), 0xd8));
#elif defined DSQ_X86
  for (int i = 0; i < VECTORS; i += 2) write(out + 4 * i, _mm_packs_epi32((__m128i)code[i], (__m128i)code[i + 1]));
#else
  for (int i = 0; i < VECTORS; i++) write(out + LANES * i, __builtin_convertvector(code[i], I16));
#endif
}

#if LANES == 16
// Within each 128 bits: four codes of each vector in turn.
INLINE __m512i narrow_to_bytes(const I code[VECTORS]) {
  __m512i low = _mm512_packs_epi32((__m512i)code[0], (__m512i)code[1]);
  __m512i high = _mm512_packs_epi32((__m512i)code[2], (__m512i)code[3]);
  return _mm512_packs_epi16(low, high);
}
// Bring such bytes, or 32 bits made of each four of them, into the order of the codes.
INLINE __m512i in_order(__m512i fours) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), fours);
}
#elif LANES == 8
INLINE __m256i narrow_to_bytes(const I code[4]) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i low = _mm256_packs_epi32((__m256i)code[0], (__m256i)code[1]);
  __m256i high = _mm256_packs_epi32((__m256i)code[2], (__m256i)code[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}
// 32 codes of 6 bits in 24 bytes, and 8 bytes of anything.
INLINE __m256i sixes(__m256i code) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 0, 0);
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0));
  code = _mm256_maddubs_epi16(_mm256_and_si256(code, _mm256_set1_epi8(63)), _mm256_set1_epi16(0x4001));
  code = _mm256_madd_epi16(code, _mm256_set1_epi32(0x10000001));  // four codes in 24 of 32 bits
  return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(code, bytes), lanes);
}
#elif defined DSQ_X86
INLINE __m128i narrow_to_bytes(const I code[4]) {
  __m128i low = _mm_packs_epi32((__m128i)code[0], (__m128i)code[1]);
  __m128i high = _mm_packs_epi32((__m128i)code[2], (__m128i)code[3]);
  return _mm_packs_epi16(low, high);
}
#elif defined __aarch64__
INLINE uint8x16_t narrow_to_bytes(const I code[4]) {
  const uint16x8_t low = vuzp1q_u16((uint16x8_t)code[0], (uint16x8_t)code[1]);
  const uint16x8_t high = vuzp1q_u16((uint16x8_t)code[2], (uint16x8_t)code[3]);
  return vuzp1q_u8((uint8x16_t)low, (uint8x16_t)high);
}
// Bytes in pairs: the lowest BITS bits of the first, then those of the second, in a byte.
template <int BITS> INLINE uint8x16_t joined(uint8x16_t a, uint8x16_t b) {
  return vsliq_n_u8(vuzp1q_u8(a, b), vuzp2q_u8(a, b), BITS);
}
#endif

// ---- packing ----

// Any width: codes pair up in 32-bit lanes, pairs in 64-bit lanes, those in 128 bits, the upper one shifted down to
// where the lower one ends. Eight codes fill `bits` bytes.
INLINE void pack_any(const int16_t code[TILE], int bits, uint8_t* out) {
  const uint32_t one = (1u << bits) - 1, ones = one | one << 16;
  const uint64_t two = (1ull << 2 * bits) - 1;
  const int shift = 4 * bits;  // at most 60: width 16 does not come here
  alignas(64) uint64_t four[TILE / 4];
  for (int i = 0; i < TILE; i += 2 * LANES) {
    U pair = read<U>(code + i) & ones;
    pair = (pair & one) | ((pair >> (16 - bits)) & ~one);
    U64 quad = (U64)pair;
    quad = (quad & two) | ((quad >> (32 - 2 * bits)) & ~two);
    write(four + i / 4, quad);
  }
  uint8_t bytes[TILE * 2 + 16], *to = bytes;
  for (int i = 0; i < TILE / 4; i += 2, to += bits) {
    uint64_t words[2] = {four[i] | four[i + 1] << shift, four[i + 1] >> (64 - shift)};
    memcpy(to, words, sizeof words);
  }
  memcpy(out, bytes, (size_t)(TILE / 8 * bits));
}

// Packs a tile. WIDTH: the width, where it has code of its own, else 0.
template <int WIDTH> INLINE void pack_tile(const I code[VECTORS], int bits, uint8_t* out) {
  if constexpr (WIDTH == 0 || (WIDTH == 6 && LANES < 8)) {
    alignas(64) int16_t pair[TILE];
    narrow(code, pair);
    pack_any(pair, bits, out);
  } else if constexpr (WIDTH == 16) {
    narrow(code, (int16_t*)out);
#if LANES == 16
  } else {
    __m512i c = narrow_to_bytes(code);
    if constexpr (WIDTH == 8) {
      write(out, in_order(c));
    } else if constexpr (WIDTH == 4) {
      const __m512i order = _mm512_castsi256_si512(
          _mm256_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27));
      c = _mm512_maddubs_epi16(_mm512_and_si512(c, _mm512_set1_epi8(15)), _mm512_set1_epi16(0x1001));
      write(out, _mm512_castsi512_si256(_mm512_permutexvar_epi16(order, _mm512_packus_epi16(c, c))));
    } else if constexpr (WIDTH == 6) {
      const __m512i close = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0);
      const __m512i three = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0));
      c = _mm512_maddubs_epi16(_mm512_and_si512(c, _mm512_set1_epi8(63)), _mm512_set1_epi16(0x4001));
      c = in_order(_mm512_madd_epi16(c, _mm512_set1_epi32(0x10000001)));  // 24 bits in 32
      c = _mm512_permutexvar_epi32(close, _mm512_shuffle_epi8(c, three));
      write(out, _mm512_castsi512_si256(c));
      write(out + 32, _mm512_extracti32x4_epi32(c, 2));
    } else {
      const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      c = _mm512_maddubs_epi16(_mm512_and_si512(c, _mm512_set1_epi8(3)), _mm512_set1_epi16(0x0401));
      c = _mm512_madd_epi16(c, _mm512_set1_epi32(0x00100001));
      write(out, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(c), order));
    }
#elif LANES == 8
  } else {
    __m256i a = narrow_to_bytes(code), b = narrow_to_bytes(code + 4);
    if constexpr (WIDTH == 8) {
      write(out, a);
      write(out + 32, b);
    } else if constexpr (WIDTH == 4) {
      const __m256i mask = _mm256_set1_epi8(15), weights = _mm256_set1_epi16(0x1001);
      a = _mm256_maddubs_epi16(_mm256_and_si256(a, mask), weights);
      b = _mm256_maddubs_epi16(_mm256_and_si256(b, mask), weights);
      write(out, _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
    } else if constexpr (WIDTH == 6) {
      a = sixes(a), b = sixes(b);
      write(out, a);  // and 8 bytes more, which are those of b
      write(out + 24, _mm256_castsi256_si128(b));
      _mm_storel_epi64((__m128i*)(out + 40), _mm256_extracti128_si256(b, 1));
    } else {
      const __m256i mask = _mm256_set1_epi8(3), weights = _mm256_set1_epi16(0x0401);
      const __m256i more = _mm256_set1_epi32(0x00100001);
      a = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(a, mask), weights), more);
      b = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(b, mask), weights), more);
      a = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
      write(out, _mm_packus_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }
#elif defined DSQ_X86
  } else {
    __m128i c[4];
    for (int i = 0; i < 4; i++) {
      c[i] = narrow_to_bytes(code + 4 * i);
      if constexpr (WIDTH == 4)
        c[i] = _mm_or_si128(_mm_and_si128(c[i], _mm_set1_epi16(15)),
                            _mm_and_si128(_mm_srli_epi16(c[i], 4), _mm_set1_epi16(0xf0)));
      if constexpr (WIDTH == 2) {
        c[i] = _mm_or_si128(_mm_and_si128(c[i], _mm_set1_epi16(3)),
                            _mm_and_si128(_mm_srli_epi16(c[i], 6), _mm_set1_epi16(12)));
        c[i] = _mm_and_si128(_mm_or_si128(c[i], _mm_srli_epi32(c[i], 12)), _mm_set1_epi32(255));
      }
    }
    if constexpr (WIDTH == 8) {
      for (int i = 0; i < 4; i++) write(out + 16 * i, c[i]);
    } else if constexpr (WIDTH == 4) {
      write(out, _mm_packus_epi16(c[0], c[1]));
      write(out + 16, _mm_packus_epi16(c[2], c[3]));
    } else {
      write(out, _mm_packus_epi16(_mm_packs_epi32(c[0], c[1]), _mm_packs_epi32(c[2], c[3])));
    }
#elif defined __aarch64__
  } else {
    uint8x16_t c[4];
    for (int i = 0; i < 4; i++) c[i] = narrow_to_bytes(code + 4 * i);
    if constexpr (WIDTH == 8) {
      for (int i = 0; i < 4; i++) write(out + 16 * i, c[i]);
    } else if constexpr (WIDTH == 4) {
      write(out, joined<4>(c[0], c[1]));
      write(out + 16, joined<4>(c[2], c[3]));
    } else {
      write(out, joined<4>(joined<2>(c[0], c[1]), joined<2>(c[2], c[3])));
    }
#else
  } else {
    int16_t c[TILE];
    narrow(code, c);
    if constexpr (WIDTH == 8)
      for (int i = 0; i < TILE; i++) out[i] = (uint8_t)c[i];
    else if constexpr (WIDTH == 4)
      for (int i = 0; i < TILE / 2; i++) out[i] = (uint8_t)((c[2 * i] & 15) | c[2 * i + 1] << 4);
    else
      for (int i = 0; i < TILE; i += 4)
        out[i / 4] = (uint8_t)((c[i] & 3) | (c[i + 1] & 3) << 2 | (c[i + 2] & 3) << 4 | c[i + 3] << 6);
#endif
  }
}

// ---- and back ----

#if LANES == 4 && !defined __aarch64__
INLINE void unpack_eight(const uint8_t* in, int bits, int16_t* code) {
  uint64_t words[2];
  memcpy(words, in, sizeof words);
  int shift = 4 * bits;
  uint64_t half[2] = {words[0], bits == 16 ? words[1] : words[0] >> shift | words[1] << (64 - shift)};
  for (int i = 0; i < 8; i++) code[i] = (int16_t)((int64_t)(half[i / 4] << (64 - bits * (i % 4 + 1))) >> (64 - bits));
}
#endif

// Turns a tile's bytes into codes of any width: each lane fetches the bytes that hold its code, shifts
// the code to the top, and back with its sign. Reads up to 16 bytes beyond the tile's.
class Unpacker {
 public:
  explicit Unpacker(int bits) : bits_(bits) {
#if LANES == 16
    for (int i = 0; i < 16; i++) {
      int bit = i * bits;
      ((uint32_t*)&fetch_)[i] = (uint32_t)(bit / 16 | (bit / 16 + 1) << 16);
      ((int32_t*)&left_)[i] = 32 - bits - bit % 16;
    }
    right_ = _mm512_set1_epi32(32 - bits);
    words_ = (__mmask16)((1u << bits) - 1);
#elif LANES == 8
    for (int i = 0; i < 8; i++) {
      int bit = i * bits;
      for (int j = 0; j < 4; j++) ((uint8_t*)&fetch_)[4 * i + j] = (uint8_t)(bit / 8 + j < 16 ? bit / 8 + j : 0x80);
      ((int32_t*)&left_)[i] = 32 - bits - bit % 8;
    }
    right_ = _mm256_set1_epi32(32 - bits);
#elif defined __aarch64__
    for (int i = 0; i < 8; i++) {
      const int bit = i * bits;
      for (int j = 0; j < 4; j++) ((uint8_t*)fetch_)[4 * i + j] = (uint8_t)(bit / 8 + j);  // 0 from 16 on
      ((int32_t*)left_)[i] = 32 - bits - bit % 8;
    }
    right_ = vdupq_n_s32(bits - 32);  // a negative shift goes to the right
#endif
  }

#if LANES == 8
  // Vector v of the tile.
  INLINE I vector(const uint8_t* in, int v) const {
    const __m256i bytes = _mm256_broadcastsi128_si256(read<__m128i>(in + v * bits_));
    return (I)_mm256_srav_epi32(_mm256_sllv_epi32(_mm256_shuffle_epi8(bytes, fetch_), left_), right_);
  }
#elif defined __aarch64__
  INLINE I vector(const uint8_t* in, int v) const {
    const uint8x16_t bytes = vqtbl1q_u8(read<uint8x16_t>(in + v / 2 * bits_), fetch_[v % 2]);
    return (I)vshlq_s32(vshlq_s32((int32x4_t)bytes, left_[v % 2]), right_);
  }
#endif

  // The codes as floats.
  INLINE void tile(const uint8_t* in, F code[VECTORS]) const {
#if LANES == 16
    // 16 codes of 2 or 4 bits look their floats up, in a table that repeats: only 4 bits of a lane count
    if (bits_ == 4) {
      EACH_VECTOR(v) {
        const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadu_si64(in + 8 * v));
        const __m512i pairs = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
        code[v] = (F)_mm512_permutexvar_ps(pairs, four_bits());
      }
    } else if (bits_ == 2) {
      EACH_VECTOR(v) {
        const __m512i word = _mm512_broadcastd_epi32(_mm_loadu_si32(in + 4 * v));
        code[v] = (F)_mm512_permutexvar_ps(_mm512_srlv_epi32(word, even_lanes()), two_bits());
      }
    } else if (bits_ == 8) {
      EACH_VECTOR(v) code[v] = (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(in + 16 * v)));
    } else if (bits_ == 16) {
      EACH_VECTOR(v) code[v] = (F)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(read<__m256i>(in + 32 * v)));
    } else {
      EACH_VECTOR(v) {
        __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(words_, in + 2 * v * bits_));
        __m512i top = _mm512_sllv_epi32(_mm512_permutexvar_epi16(fetch_, bytes), left_);
        code[v] = (F)_mm512_cvtepi32_ps(_mm512_srav_epi32(top, right_));
      }
    }
#elif LANES == 8 || defined __aarch64__
    EACH_VECTOR(v) code[v] = __builtin_convertvector(vector(in, v), F);
#else
    int16_t pair[TILE];
    for (int i = 0; i < TILE; i += 8) unpack_eight(in + i / 8 * bits_, bits_, pair + i);
    EACH_VECTOR(v) code[v] = __builtin_convertvector(__builtin_convertvector(read<I16>(pair + LANES * v), I), F);
#endif
  }

 private:
  int bits_;
#if LANES == 16
  static INLINE __m512 four_bits() {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  }
  static INLINE __m512 two_bits() { return _mm512_setr_ps(0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1, 0, 1, -2, -1); }
  static INLINE __m512i even_lanes() {
    return _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  }

  __m512i fetch_, left_, right_;
  __mmask16 words_;
#elif LANES == 8
  __m256i fetch_, left_, right_;
#elif defined __aarch64__
  uint8x16_t fetch_[2];  // of the first four of eight codes, and of the others
  int32x4_t left_[2], right_;
#endif
};

}  // namespace
