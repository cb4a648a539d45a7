// The functions that Python calls (abi.h). They turn addresses into pointers and call the kernels.
#include "api.h"

#include "attention/attention.h"
#include "codec/codec.h"
#include "gemm/gemm.h"
#include "linear.h"
#include "threads.h"

namespace {

// A pointer to whatever the callee takes.
struct At {
  address to;
  template <class T> operator T*() const { return (T*)to; }
};

}  // namespace

const char* dsq_isa(int index, int* usable) {
  const IsaKernels* isa = isa_kernels(index);
  if (!isa) return nullptr;
  *usable = isa->usable();
  return isa->name;
}

int dsq_has_gemm(int gemm) {
  if (gemm == GEMM_INTEGER) return integer_gemm() != nullptr;
  if (const Bfloat16Gemm* bfloat16 = bfloat16_gemm(gemm)) return bfloat16->usable();
  return gemm == GEMM_TORCH;
}

const char* dsq_integer_gemm(int index, int* usable) { return integer_gemm_name(index, usable); }

void dsq_use_integer_gemm(int index) { use_integer_gemm(index); }

int dsq_gemm_integer_fits(int a_bits, int b_bits, int block_size) { return integer_gemm()->fits(a_bits, b_bits, block_size); }

void dsq_use_threads(address run, address number) { use_threads((OpenMpParallel)run, (OpenMpThreadNumber)number); }

void dsq_quantize(const CodecDesc* desc, address x, address out, int threads, uint64_t seed) {
  quantize_tensor(*desc, At{x}, At{out}, threads, seed);
}

void dsq_pack(const CodecDesc* desc, address x, address codes, address scales, int threads, uint64_t seed) {
  pack_tensor(*desc, At{x}, At{codes}, At{scales}, threads, seed);
}

void dsq_unpack(const CodecDesc* desc, address codes, address scales, address out, int threads) {
  unpack_tensor(*desc, At{codes}, At{scales}, At{out}, threads);
}

void dsq_quantize_grid(const GridDesc* desc, address x, address out, int threads, uint64_t seed) {
  quantize_grid_tensor(*desc, At{x}, At{out}, threads, seed);
}

void dsq_pack_grid(const GridDesc* desc, address x, address codes, address scales, int threads, uint64_t seed) {
  pack_grid_tensor(*desc, At{x}, At{codes}, At{scales}, threads, seed);
}

void dsq_unpack_grid(const GridDesc* desc, address codes, address scales, address out, int threads) {
  unpack_grid_tensor(*desc, At{codes}, At{scales}, At{out}, threads);
}

void dsq_affine_pack(const AffineDesc* desc, address x, address running, double decay, address ranges, address codes,
                     int threads, uint64_t seed) {
  affine_pack(*desc, At{x}, At{running}, decay, At{ranges}, At{codes}, threads, seed);
}

void dsq_affine_unpack(const AffineDesc* desc, address codes, address ranges, address out, int threads) {
  affine_unpack(*desc, At{codes}, At{ranges}, At{out}, threads);
}

void dsq_pack_mask(int isa, address values, int dtype, int64_t count, float low, float high, int nan_is_open,
                   address bits, int threads) {
  MaskJob job{At{values}, At{bits}, dtype};
  job.low = low, job.high = high, job.nan_is_open = nan_is_open;
  run_mask(isa, &IsaKernels::mask, job, count, threads);
}

void dsq_unpack_mask(int isa, address bits, int64_t count, int dtype, address values, int threads) {
  const MaskJob job{At{values}, At{bits}, dtype};
  run_mask(isa, &IsaKernels::unmask, job, count, threads);
}

void dsq_apply_mask(int isa, address bits, int64_t count, int dtype, address x, address out, int threads) {
  MaskJob job{At{out}, At{bits}, dtype};
  job.source = At{x};
  run_mask(isa, &IsaKernels::apply_mask, job, count, threads);
}

void dsq_relu(int isa, address x, int64_t count, address y, address bits, int threads) {
  MaskJob job{At{y}, At{bits}, FLOAT32};
  job.source = At{x};
  run_mask(isa, &IsaKernels::relu, job, count, threads);
}

void dsq_scale_mask(int isa, address bits, int64_t count, int dtype, address x, float factor, address out, int threads) {
  MaskJob job{At{out}, At{bits}, dtype};
  job.source = At{x}, job.factor = factor;
  run_mask(isa, &IsaKernels::scale_mask, job, count, threads);
}

void dsq_bernoulli(int isa, address generator, int64_t count, uint64_t threshold, int bytes, address out) {
  isa_kernels(isa)->bernoulli({At{generator}, count, threshold, bytes != 0, At{out}});
}

int64_t dsq_gemm_bfloat16_scratch(int gemm, int64_t rows, int64_t columns, int64_t depth) {
  return bfloat16_gemm(gemm)->scratch({rows, columns, depth});
}

void dsq_gemm_bfloat16(int gemm, address a, int64_t a_row_stride, int64_t a_depth_stride, address b,
                       int64_t b_depth_stride, int64_t b_column_stride, address bias, address c, int64_t rows,
                       int64_t columns, int64_t depth, address scratch, int threads) {
  bfloat16_gemm(gemm)->multiply({At{a}, a_row_stride, a_depth_stride}, {At{b}, b_column_stride, b_depth_stride},
                                At{bias}, {At{c}, FLOAT32, nullptr}, {rows, columns, depth}, At{scratch}, threads);
}

#if defined DSQ_X86 || defined DSQ_ARM  // elsewhere dsq_has_gemm says no, and nobody asks for these

int64_t dsq_gemm_integer_scratch(int64_t rows, int64_t columns, int64_t depth, int a_bits, int b_bits, int block_size) {
  return integer_gemm()->scratch({rows, columns, depth}, a_bits, b_bits, block_size);
}

void dsq_gemm_integer(address a_codes, address a_scales, int a_kind, int a_bits, int a_across, int a_digits, int a_code_bits,
                      address b_codes, address b_scales, int b_kind, int b_bits, int b_across, int b_digits, int b_code_bits,
                      int one_scale, int block_size, address bias, address c, int64_t rows, int64_t columns, int64_t depth,
                      address scratch, int threads) {
  integer_gemm()->multiply({At{a_codes}, At{a_scales}, a_kind, a_bits, a_across != 0, a_digits, a_code_bits},
                           {At{b_codes}, At{b_scales}, b_kind, b_bits, b_across != 0, b_digits, b_code_bits}, one_scale != 0,
                           block_size, At{bias}, {At{c}, FLOAT32, nullptr}, {rows, columns, depth}, At{scratch}, threads);
}

void dsq_linear_forward(const LinearForwardDesc* desc, address x, address w, address bias, address y, address codes,
                        address scales, address scratch, int threads, uint64_t seed) {
  linear_forward(*desc, At{x}, At{w}, At{bias}, At{y}, At{codes}, At{scales}, At{scratch}, threads, seed);
}

void dsq_linear_backward(const LinearBackwardDesc* desc, address dy, address w, address codes, address scales,
                         address dx, address dw, address scratch, int threads, uint64_t seed) {
  linear_backward(*desc, At{dy}, At{w}, At{codes}, At{scales}, At{dx}, At{dw}, At{scratch}, threads, seed);
}

#endif

const char* dsq_attention(int index, int* usable) { return attention_name(index, usable); }

void dsq_use_attention(int index) { use_attention(index); }

int64_t dsq_attention_scratch(const AttentionDesc* desc, int backward) {
  return attention_kernels().scratch(*desc, backward != 0);
}

void dsq_attention_forward(const AttentionDesc* desc, const AttentionTensors* tensors, address scratch, int threads) {
  attention_kernels().forward(*desc, *tensors, At{scratch}, threads);
}

void dsq_attention_backward(const AttentionDesc* desc, const AttentionTensors* tensors, address scratch, int threads) {
  attention_kernels().backward(*desc, *tensors, At{scratch}, threads);
}
