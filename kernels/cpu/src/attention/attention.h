// Scaled dot-product attention and its gradients (abi.h says of what).
#pragma once

#include "../api.h"

// One instruction set's kernels.
struct AttentionKernels {
  bool (*usable)();
  // Floats of scratch memory for each thread; likewise below.
  int64_t (*scratch)(const AttentionDesc& desc, bool backward);
  void (*forward)(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
  void (*backward)(const AttentionDesc& desc, const AttentionTensors& tensors, float* scratch, int threads);
};
extern const AttentionKernels ATTENTION_AVX512, ATTENTION_AVX2;

// The best that this machine has the instructions of, or null.
inline const AttentionKernels* attention_kernels() {
  if (ATTENTION_AVX512.usable()) return &ATTENTION_AVX512;
  return ATTENTION_AVX2.usable() ? &ATTENTION_AVX2 : nullptr;
}
