// Quantizing, packing and unpacking a tensor, and its masks, dealt out to threads.
#pragma once

#include "job.h"

// A tensor on its way to values on a format's grid, or to codes and scales.
class Encoding {
 public:
  Encoding(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed);
  Encoding(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* scales, int threads, uint64_t seed);
  Encoding(const Encoding&) = delete;
  void run(int threads);
  // Two of the same tensor, which is read from memory once.
  friend void encode_both(Encoding& one, Encoding& other, int threads);

 private:
  void start(int threads, uint64_t seed);
  void find_exponent(int threads);
  void run_piece(int64_t piece, int64_t pieces);
  void run_alone(int threads);
  void finish(int threads);

  const CodecDesc p_;
  void (*IsaKernels::*const kernel_)(const CodecJob&, int64_t begin, int64_t end);
  uint8_t* const scales_ = nullptr;
  CodecJob job_;
  Magnitudes found_;                  // of a guessed exponent of the tensor
  std::atomic<uint32_t> largest_{0};  // of a static one
};

void quantize_tensor(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed);
void pack_tensor(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed);
void unpack_tensor(const CodecDesc& desc, const uint8_t* codes, const uint8_t* exponents, void* out, int threads);

// The same for formats that are data.
void quantize_grid_tensor(const GridDesc& desc, const void* x, void* out, int threads, uint64_t seed);
void pack_grid_tensor(const GridDesc& desc, const void* x, uint8_t* codes, uint8_t* scales, int threads, uint64_t seed);
void unpack_grid_tensor(const GridDesc& desc, const uint8_t* codes, const uint8_t* scales, void* out, int threads);

// Codes between a low and a high value of each group.
void affine_pack(const AffineDesc& desc, const void* x, float* running, double decay, float* ranges, uint8_t* codes,
                 int threads, uint64_t seed);
void affine_unpack(const AffineDesc& desc, const uint8_t* codes, float* ranges, void* out, int threads);

// Runs a kernel of masks on the job's `count` values.
void run_mask(int isa, void (*IsaKernels::*kernel)(const MaskJob&, int64_t, int64_t), const MaskJob& job, int64_t count,
              int threads);

// Instruction set `index`, best first, or null past the last.
const IsaKernels* isa_kernels(int index);
