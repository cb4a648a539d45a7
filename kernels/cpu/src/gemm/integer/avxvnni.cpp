// The integer GEMM on AVX-VNNI, which CPUs without AVX-512 may have: a lane's products are summed in 32 bits.
#include <cpuid.h>

#include "block_products_256.h"

namespace {

bool as_bytes(int a_bits, int b_bits, int block_size) { return a_bits <= 8 && b_bits <= 8 && block_size % STEPS<int8_t> == 0; }

template <class Code, int GROUP>
INLINE void multiply_block(const int8_t* rows, const int8_t* columns, int groups, __m256i (&dots)[ROWS][2]) {
  for (auto& of_row : dots) of_row[0] = of_row[1] = _mm256_setzero_si256();
  for (int group = 0; group < groups; group++)
#pragma GCC unroll 8
    for (int e = 0; e < GROUP; e++, rows += ELEMENTS_SIZE, columns += ELEMENTS_SIZE) {
      const __m256i b[2] = {element_of(columns), element_of(columns + 32)};
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const __m256i a = element_of_all(rows + r * ELEMENT);
        for (int half = 0; half < 2; half++)
          dots[r][half] = sizeof(Code) == 1 ? _mm256_dpbusd_avx_epi32(dots[r][half], a, b[half])
                                            : _mm256_dpwssd_avx_epi32(dots[r][half], a, b[half]);
      }
    }
}

bool usable() {
#ifdef DSQ_EMULATED  // .ci/avx512
  return true;
#else
  unsigned a, b, c, d;  // Clang's __builtin_cpu_supports does not know it
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
         (a >> 4 & 1);
#endif
}

}  // namespace

const IntegerGemm INTEGER_AVXVNNI = {"avx_vnni", usable, fits, scratch_size, gemm};
