// x86-64 with AVX2 and F16C; compiled with the flags that setup.py gives this file.
#define LANES 8
#include "../codec/kernels.h"

static bool usable() { return __builtin_cpu_supports("avx2"); }  // F16C is older; Clang's function does not know it

const IsaKernels AVX2 = kernels_of("avx2", usable);
