// x86-64 with AVX2, F16C and FMA; compiled with the flags that setup.py gives this file.
#define LANES 8
#include "kernels.h"

static bool usable() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const AttentionKernels ATTENTION_AVX2 = kernels_of("avx2", usable);
