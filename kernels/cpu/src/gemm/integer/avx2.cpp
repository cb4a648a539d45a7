// The integer GEMM on AVX2. Products of bytes are summed in 16 bits: narrow codes leave them room for the 8 products of a
// lane in 16 steps. Products of wider codes take twice the time.
#include "block_products_256.h"

namespace {

// The most bits of both codes together: a lane's 8 products in a group of 4 elements, of 2^a - 1 and 2^(b - 1) at most,
// then fit 16 bits.
constexpr int MAX_BITS = 13;

bool as_bytes(int a_bits, int b_bits, int block_size) {
  return a_bits <= 8 && b_bits <= 8 && a_bits + b_bits <= MAX_BITS && block_size % STEPS<int8_t> == 0;
}

// Sums the products of GROUP elements: of bytes in 16 bits, else in 32.
template <class Code, int GROUP> INLINE void dot(const int8_t* rows, const int8_t* columns, __m256i (&sums)[ROWS][2]) {
#pragma GCC unroll 8
  for (int e = 0; e < GROUP; e++, rows += ELEMENTS_SIZE, columns += ELEMENTS_SIZE) {
    const __m256i b[2] = {element_of(columns), element_of(columns + 32)};
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const __m256i a = element_of_all(rows + r * ELEMENT);
      for (int half = 0; half < 2; half++) {
        const __m256i products = sizeof(Code) == 1 ? _mm256_maddubs_epi16(a, b[half]) : _mm256_madd_epi16(a, b[half]);
        sums[r][half] = !e                  ? products
                        : sizeof(Code) == 1 ? _mm256_add_epi16(sums[r][half], products)
                                            : _mm256_add_epi32(sums[r][half], products);
        asm("" : "+x"(sums[r][half]));  // GCC would add products in another order, and keep all of them
      }
    }
  }
}

template <class Code, int GROUP>
INLINE void multiply_block(const int8_t* rows, const int8_t* columns, int groups, __m256i (&dots)[ROWS][2]) {
  auto whole = [](__m256i sums) { return sizeof(Code) == 1 ? added_pairs(sums) : sums; };
  dot<Code, GROUP>(rows, columns, dots);
  for (auto& of_row : dots)
    for (__m256i& sums : of_row) sums = whole(sums);
  for (int group = 1; group < groups; group++) {
    __m256i more[ROWS][2];
    rows += GROUP * ELEMENTS_SIZE, columns += GROUP * ELEMENTS_SIZE;
    dot<Code, GROUP>(rows, columns, more);
    for (int r = 0; r < ROWS; r++)
      for (int half = 0; half < 2; half++) dots[r][half] = _mm256_add_epi32(dots[r][half], whole(more[r][half]));
  }
}

bool usable() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace

const IntegerGemm INTEGER_AVX2 = {"avx2", usable, fits, scratch_size, gemm};
