// Scaled dot-product attention and its gradients (abi.h says of what).
#pragma once

#include "api.h"

bool attention_usable();
// Floats of scratch memory for each thread; likewise below.
int64_t attention_scratch(const AttentionDesc& desc, bool backward);
void attention_forward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
void attention_backward(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
