// Scaled dot-product attention and its gradients (arguments: abi.h).
#pragma once

#include "../api.h"

// One instruction set's kernels.
struct AttentionKernels {
  const char* name;
  bool (*usable)();
  int64_t (*scratch)(const AttentionDesc& desc, bool backward);  // floats for each thread; likewise below
  void (*forward)(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
  void (*backward)(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
};
extern const AttentionKernels ATTENTION_AVX512, ATTENTION_AVX2;

// dsq_attention and dsq_use_attention of abi.h, and the kernels in use.
const char* attention_name(int index, int* usable);
void use_attention(int index);
const AttentionKernels& attention_kernels();
