// Any processor: vectors of 16 bytes (SSE2, NEON).
#define LANES 4
#include "engine.h"

const Isa PORTABLE = {"portable", [] { return true; }, largest, quantize, pack, unpack, mask, unmask, apply_mask, relu};
