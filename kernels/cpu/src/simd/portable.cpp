// Any processor: vectors of 16 bytes (SSE2, NEON).
#define LANES 4
#include "../codec/kernels.h"

static bool usable() { return true; }

const IsaKernels PORTABLE = kernels_of("portable", usable);
