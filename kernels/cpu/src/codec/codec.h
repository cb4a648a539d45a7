// Quantising, packing and unpacking a tensor, and its masks, dealt out to threads.
#pragma once

#include "job.h"

void quantize_tensor(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed);
void pack_tensor(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed);
void unpack_tensor(const CodecDesc& desc, const uint8_t* codes, const uint8_t* exponents, void* out, int threads);

// Codes between a low and a high value of each group.
void affine_extents(const AffineDesc& desc, const void* x, float* low, float* high, int threads);
void affine_pack(const AffineDesc& desc, const void* x, float* low, float* step, uint8_t* codes, int threads,
                 uint64_t seed);
void affine_unpack(const AffineDesc& desc, const uint8_t* codes, const float* low, const float* step, void* out,
                   int threads);

// Runs a kernel of masks on the job's `count` values.
void run_mask(int isa, void (*IsaKernels::*kernel)(const MaskJob&, int64_t, int64_t), const MaskJob& job, int64_t count,
              int threads);

// Instruction set `index`, best first, or null past the last.
const IsaKernels* isa_kernels(int index);
