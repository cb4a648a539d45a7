// The passes of a linear layer, each in one call, as the overhead of several calls would cost more than the work of a
// small layer. Intermediate results are in scratch memory, which the caller reuses.
#pragma once

#include "api.h"

// y = x w^T + bias; x is packed into `codes` and `scales` too, unless codes is null.
void linear_forward(const LinearForwardDesc& desc, const uint8_t* x, const uint8_t* w, const float* bias,
                    uint8_t* y, uint8_t* codes, uint8_t* scales, uint8_t* scratch, int threads, uint64_t seed);

// dx = dy w, and dw = dy^T x from the packed x. A null result is not computed.
void linear_backward(const LinearBackwardDesc& desc, const uint8_t* dy, const uint8_t* w, const uint8_t* codes,
                     const uint8_t* scales, uint8_t* dx, uint8_t* dw, uint8_t* scratch, int threads, uint64_t seed);
