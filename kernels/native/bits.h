// Codes to and from bitstreams: little-endian, `bits` to a code, two's complement.
#pragma once

#include "lanes.h"

namespace {

// WIDTH is the width where it has loops of its own, else 0. Codes wait for packing in the narrowest whole type.
template <int WIDTH> struct Waiting { typedef int8_t type; };
template <> struct Waiting<0> { typedef int16_t type; };
template <> struct Waiting<16> { typedef int16_t type; };

// Eight codes fill `bits` bytes; sixteen are written.
inline void pack_eight(const int16_t* code, int bits, uint8_t* out) {
  uint64_t mask = (1ull << bits) - 1, low = 0, high = 0;
  for (int i = 3; i >= 0; i--) {
    low = low << bits | (code[i] & mask);
    high = high << bits | (code[i + 4] & mask);
  }
  int shift = 4 * bits;  // at most 60: width 16 does not come here
  uint64_t words[2] = {low | high << shift, high >> (64 - shift)};
  memcpy(out, words, sizeof words);
}

inline void unpack_eight(const uint8_t* in, int bits, int16_t* code) {
  uint64_t words[2];
  memcpy(words, in, sizeof words);
  int shift = 4 * bits;
  uint64_t half[2] = {words[0], bits == 16 ? words[1] : words[0] >> shift | words[1] << (64 - shift)};
  for (int i = 0; i < 8; i++) code[i] = (int16_t)((int64_t)(half[i / 4] << (64 - bits * (i % 4 + 1))) >> (64 - bits));
}

// The codes of a chunk into its 16 * bits bytes; may write 16 bytes more.
template <int WIDTH> inline void pack_chunk(const typename Waiting<WIDTH>::type* code, int bits, uint8_t* out) {
  if constexpr (WIDTH == 0) {
    for (int i = 0; i < CHUNK; i += 8) pack_eight(code + i, bits, out + i / 8 * bits);
  } else if constexpr (WIDTH == 4) {
#if LANES == 16
    for (int i = 0; i < CHUNK; i += 64) {
      __m512i c = _mm512_and_si512(read<__m512i>(code + i), _mm512_set1_epi8(15));
      write(out + i / 2, _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(c, _mm512_set1_epi16(0x1001))));
    }
#else
    for (int i = 0; i < CHUNK / 2; i++) out[i] = (uint8_t)((code[2 * i] & 15) | code[2 * i + 1] << 4);
#endif
  } else if constexpr (WIDTH == 2) {
#if LANES == 16
    for (int i = 0; i < CHUNK; i += 64) {
      __m512i c = _mm512_and_si512(read<__m512i>(code + i), _mm512_set1_epi8(3));
      c = _mm512_madd_epi16(_mm512_maddubs_epi16(c, _mm512_set1_epi16(0x0401)), _mm512_set1_epi32(0x00100001));
      write(out + i / 4, _mm512_cvtepi32_epi8(c));
    }
#else
    for (int i = 0; i < CHUNK / 4; i++) {
      const int8_t* c = code + 4 * i;
      out[i] = (uint8_t)((c[0] & 3) | (c[1] & 3) << 2 | (c[2] & 3) << 4 | c[3] << 6);
    }
#endif
  } else {
    memcpy(out, code, CHUNK * WIDTH / 8);
  }
}

// What turns bytes into LANES codes, whatever their width: each lane fetches the bytes that hold its code, shifts the
// code to the top, and back with its sign.
class Unpacker {
 public:
  explicit Unpacker(int bits) : bits_(bits) {
#if LANES == 16
    for (int i = 0; i < 16; i++) {
      int bit = i * bits;
      ((uint32_t*)&fetch_)[i] = (uint32_t)(bit / 16 | (bit / 16 + 1) << 16);
      ((int32_t*)&left_)[i] = 32 - bits - bit % 16;
    }
    words_ = (__mmask32)((1ull << bits) - 1);
#elif LANES == 8
    for (int i = 0; i < 8; i++) {
      int bit = i * bits;
      for (int j = 0; j < 4; j++) ((uint8_t*)&fetch_)[4 * i + j] = (uint8_t)(bit / 8 + j < 16 ? bit / 8 + j : 0x80);
      ((int32_t*)&left_)[i] = 32 - bits - bit % 8;
    }
#endif
  }

  // Calls put(column, codes) for columns 0..n of a chunk, n a multiple of 16; may read 16 bytes beyond them.
  template <class Put> void each(const uint8_t* in, int n, Put put) const {
#if LANES == 16
    for (int i = 0; i < n; i += 16) {
      __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16((__mmask16)words_, in + i / 8 * bits_));
      __m512i code = _mm512_sllv_epi32(_mm512_permutexvar_epi16(fetch_, bytes), left_);
      put(i, (I)_mm512_sra_epi32(code, _mm_cvtsi32_si128(32 - bits_)));
    }
#elif LANES == 8
    for (int i = 0; i < n; i += 8) {
      __m256i bytes = _mm256_broadcastsi128_si256(read<__m128i>(in + i / 8 * bits_));
      __m256i code = _mm256_sllv_epi32(_mm256_shuffle_epi8(bytes, fetch_), left_);
      put(i, (I)_mm256_sra_epi32(code, _mm_cvtsi32_si128(32 - bits_)));
    }
#else
    int16_t code[CHUNK];
    for (int i = 0; i < n; i += 8) unpack_eight(in + i / 8 * bits_, bits_, code + i);
    for (int i = 0; i < n; i += LANES) put(i, __builtin_convertvector(read<I16>(code + i), I));
#endif
  }

 private:
  int bits_;
#if LANES == 16
  __m512i fetch_, left_;
  __mmask32 words_;
#elif LANES == 8
  __m256i fetch_, left_;
#endif
};

}  // namespace
