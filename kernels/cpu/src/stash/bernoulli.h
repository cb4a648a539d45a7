// Bernoulli draws of PyTorch's generator of random numbers on CPUs (MT19937), bit for bit those of Tensor.bernoulli_ on
// processors of other makers than Intel (aten/src/ATen/native/cpu/DistributionTemplates.h), which draws one at a time.
#pragma once

#include "../simd/lanes.h"

namespace {

constexpr int STATE = 624, MIDDLE = 397;  // of MT19937: words of the state, and how far ahead one is mixed in

// A draw is 53 bits of two words, the higher first, and is kept below the threshold.
constexpr int DRAW_WORDS = 2, BYTE_WORDS = 8 * DRAW_WORDS;

// The generator as torch.get_rng_state() lays it out; what lies behind stays as it is.
struct TorchGenerator {
  uint64_t seed;
  int32_t left, seeded;  // one more than the words that are not drawn yet
  uint64_t next;         // index of the first of these
  uint64_t words[STATE];
};

// Of a word or of a vector of words.
template <class V> INLINE V twisted(V word, V next, V middle) {
  const V mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
  return middle ^ (mixed >> 1) ^ ((V{} - (next & 1u)) & 0x9908b0dfu);
}

template <class V> INLINE V tempered(V y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

// Words begin..end of the next state, from words that lie `ahead`, which are of the old or of the new state.
INLINE void twist(uint32_t* words, int begin, int end, int ahead) {
  int i = begin;
  for (; i + LANES <= end; i += LANES)
    write(words + i, twisted(read<U>(words + i), read<U>(words + i + 1), read<U>(words + i + ahead)));
  for (; i < end; i++) words[i] = twisted(words[i], words[i + 1], words[i + ahead]);
}

INLINE void next_state(uint32_t* words) {
  twist(words, 0, STATE - MIDDLE, MIDDLE);
  twist(words, STATE - MIDDLE, STATE - 1, MIDDLE - STATE);
  words[STATE - 1] = twisted(words[STATE - 1], words[0], words[MIDDLE - 1]);
}

// The top bits of the 64-bit lanes, the lowest first.
INLINE uint32_t top_bits(U64 a) {
#if LANES == 16
  return _mm512_movepi64_mask((__m512i)a);
#elif LANES == 8
  return (uint32_t)_mm256_movemask_pd((__m256d)a);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES / 2; i++) bits |= (uint32_t)(a[i] >> 63) << i;
  return bits;
#endif
}

// Whether each of eight draws is kept, a bit each.
INLINE uint8_t draw_bits(const uint32_t* buffer, uint64_t threshold) {
  constexpr uint64_t mantissa = (1ull << 53) - 1;
  uint32_t bits = 0;
  for (int i = 0; i < 8; i += LANES / 2) {
    const U64 pair = read<U64>(buffer + DRAW_WORDS * i);  // little-endian: the first word is the lower half
    bits |= top_bits((((pair << 32) | (pair >> 32)) & mantissa) - threshold) << i;
  }
  return (uint8_t)bits;
}

// Eight bits as bytes of 0 or 1.
INLINE uint64_t spread_to_bytes(uint64_t bits) {
  bits = (bits | bits << 28) & 0x0000000f0000000f;
  bits = (bits | bits << 14) & 0x0003000300030003;
  return (bits | bits << 7) & 0x0101010101010101;
}

void bernoulli(const BernoulliJob& job) {
  TorchGenerator& generator = *(TorchGenerator*)job.generator;
  uint32_t words[STATE + LANES], buffer[BYTE_WORDS + STATE + LANES];  // whole vectors are read and written
  for (int i = 0; i < STATE; i++) words[i] = (uint32_t)generator.words[i];
  int next = (int)generator.next, words_left = generator.left - 1, buffer_words = 0;  // words in `buffer`
  for (int64_t i = 0; i < job.count;) {
    if (!words_left) next_state(words), next = 0, words_left = STATE;
    const int64_t words_to_draw = DRAW_WORDS * (job.count - i) - buffer_words;
    const int number = words_to_draw < words_left ? (int)words_to_draw : words_left;
    for (int j = 0; j < number; j += LANES) write(buffer + buffer_words + j, tempered(read<U>(words + next + j)));
    next += number, words_left -= number, buffer_words += number;
    int offset = 0;
    for (; buffer_words - offset >= BYTE_WORDS; offset += BYTE_WORDS, i += 8) {
      const uint8_t bits = draw_bits(buffer + offset, job.threshold);
      if (job.bytes) write(job.out + i, spread_to_bytes(bits));
      else job.out[i / 8] = bits;
    }
    buffer_words -= offset;
    memmove(buffer, buffer + offset, sizeof *buffer * (size_t)buffer_words);
    if (const int64_t last_draws = job.count - i; last_draws < 8 && buffer_words == DRAW_WORDS * last_draws) {
      const uint32_t bits = draw_bits(buffer, job.threshold) & ((1u << last_draws) - 1);
      if (job.bytes)
        for (int64_t j = 0; j < last_draws; j++) job.out[i + j] = bits >> j & 1;
      else if (last_draws) job.out[i / 8] = (uint8_t)bits;
      break;
    }
  }
  for (int i = 0; i < STATE; i++) generator.words[i] = words[i];
  generator.next = (uint64_t)next, generator.left = words_left + 1;
}

}  // namespace
