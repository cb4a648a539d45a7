#include "linear.h"

#include "codec/codec.h"
#include "gemm/gemm.h"

namespace {

// A quantised operand: values in bfloat16 or float32, or codes with their scales.
struct Quantized {
  const uint8_t *data, *scales;
};

// The operand as the GEMM takes it, in scratch memory unless it comes so. `data` holds values, or codes with `scales`.
Quantized quantized(const OperandDesc& operand, bool as_codes, const uint8_t* data, const uint8_t* scales,
                    uint8_t* scratch, int threads, uint64_t seed) {
  if (as_codes && operand.packed) return {data, scales};
  uint8_t *const out = scratch + operand.offset, *const out_scales = scratch + operand.scales_offset;
  if (as_codes) pack_tensor(operand.codec, data, out, out_scales, threads, seed + operand.seed);
  else if (operand.packed) unpack_tensor(operand.codec, data, scales, out, threads);
  else quantize_tensor(operand.codec, data, out, threads, seed + operand.seed);
  return {out, out_scales};
}

// out = quantised(a) quantised(b) + bias, quantised if so asked. `a` is values; `b` is values, or codes with scales.
void matmul(const MatMulDesc& desc, const uint8_t* a, const uint8_t* b, const uint8_t* b_scales, const float* bias,
            float* out, uint8_t* scratch, int threads, uint64_t seed) {
  const bool as_codes = desc.gemm == GEMM_INTEGER;
  const Quantized left = quantized(desc.a, as_codes, a, nullptr, scratch, threads, seed);
  const Quantized right = quantized(desc.b, as_codes, b, b_scales, scratch, threads, seed);
  uint32_t* panels = (uint32_t*)(scratch + desc.panels_offset);
  const GemmSize size{desc.rows, desc.columns, desc.depth};
  if (desc.gemm == GEMM_INTEGER)
    gemm_integer({left.data, left.scales, desc.a.codec.scales, desc.a.codec.bits, desc.a.across != 0},
                 {right.data, right.scales, desc.b.codec.scales, desc.b.codec.bits, desc.b.across != 0},
                 desc.a.codec.box == 0, desc.box, bias, out, size, panels, threads);
  else if (desc.gemm == GEMM_BFLOAT16)
    gemm_bfloat16({(const uint16_t*)left.data, desc.a.row_stride, desc.a.column_stride},
                  {(const uint16_t*)right.data, desc.b.column_stride, desc.b.row_stride}, bias, out, size, panels,
                  threads);
  if (desc.result.bits) quantize_tensor(desc.result, out, out, threads, seed + desc.result_seed);
}

}  // namespace

void linear_forward(const LinearForwardDesc& desc, const uint8_t* x, const uint8_t* w, const float* bias, float* y,
                    uint8_t* codes, uint8_t* scales, uint8_t* scratch, int threads, uint64_t seed) {
  if (codes) pack_tensor(desc.stash, x, codes, scales, threads, seed + desc.stash_seed);
  matmul(desc.output, x, w, nullptr, bias, y, scratch, threads, seed);
}

void linear_backward(const LinearBackwardDesc& desc, const uint8_t* dy, const uint8_t* w, const uint8_t* codes,
                     const uint8_t* scales, float* dx, float* dw, uint8_t* scratch, int threads, uint64_t seed) {
  if (dx) matmul(desc.input_gradient, dy, w, nullptr, nullptr, dx, scratch, threads, seed);
  if (dw) matmul(desc.weight_gradient, dy, codes, scales, nullptr, dw, scratch, threads, seed);
}
