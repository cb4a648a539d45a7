// x86-64 with AVX-512 F, BW, DQ and VL; compiled with the flags that setup.py gives this file.
#define LANES 16
#include "kernels.h"

static bool usable() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const AttentionKernels ATTENTION_AVX512 = kernels_of("avx512", usable);
