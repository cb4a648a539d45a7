// Any processor: vectors of 16 bytes (SSE2, NEON).
#define LANES 4
#include "../codec/kernels.h"

static bool usable() { return true; }

const IsaKernels PORTABLE = {"portable", usable, largest, quantize, pack, unpack, mask, unmask, apply_mask, relu,
                        affine_extents, affine_pack, affine_unpack};
