#include "linear.h"

#include "codec/codec.h"
#include "gemm/gemm.h"

namespace {

// An operand: values, or codes with their scales.
struct OperandData {
  const uint8_t* data;
  const uint8_t* scales = nullptr;
};

// The operand in the form that the GEMM takes: in scratch memory, unless the caller passes that form.
OperandData placed(const OperandDesc& operand, bool as_codes, OperandData x, uint8_t* scratch) {
  if (as_codes && operand.packed) return x;
  return {scratch + operand.offset, scratch + operand.scales_offset};
}

// The job that writes the operand's values or codes to scratch memory.
Encoding encoding(const MatMulDesc& desc, const OperandDesc& operand, const uint8_t* x, uint8_t* scratch, int threads,
                  uint64_t seed) {
  uint8_t* const out = scratch + operand.offset;
  if (desc.gemm == GEMM_INTEGER)
    return Encoding(operand.codec, x, out, scratch + operand.scales_offset, threads, seed + operand.seed);
  return Encoding(operand.codec, x, (void*)out, threads, seed + operand.seed);
}

// Whether a GEMM can quantize its result a tile at a time, to the same bits: nothing depends on values outside a block, nor
// on where it lies.
bool quantizes_in_tiles(const CodecDesc& p) {
  return !p.stochastic && p.block_size && TILE_COLUMNS % p.block_size == 0 && p.scales != SIGNED_E4M3;
}

// out = quantized(a) quantized(b) + bias, quantized if the result has a format. An operand is values, or codes with
// scales, or null: its values are quantized in scratch memory already.
void matmul(const MatMulDesc& desc, OperandData a, OperandData b, const float* bias, uint8_t* out, uint8_t* scratch,
            int threads, uint64_t seed) {
  const bool as_codes = desc.gemm == GEMM_INTEGER;
  auto quantized = [&](const OperandDesc& operand, OperandData x) {
    const OperandData to = placed(operand, as_codes, x, scratch);
    if (!operand.packed && x.data) encoding(desc, operand, x.data, scratch, threads, seed).run(threads);
    if (operand.packed && !as_codes) unpack_tensor(operand.codec, x.data, x.scales, (void*)to.data, threads);
    return to;
  };
  const OperandData left = quantized(desc.a, a), right = quantized(desc.b, b);
  uint32_t* panels = (uint32_t*)(scratch + desc.panels_offset);
  const GemmSize size{desc.rows, desc.columns, desc.depth};
  const CodecDesc& codec = desc.result;
  const bool in_tiles = codec.bits && quantizes_in_tiles(codec), after = codec.bits && !in_tiles;
  Result result{out, codec.out_dtype, in_tiles ? &codec : nullptr};
  if (after) result.dtype = FLOAT32;
  if (after && codec.out_dtype != FLOAT32) result.to = scratch + desc.result_offset;
  if (desc.gemm == GEMM_INTEGER)
    integer_gemm()->multiply({left.data, left.scales, desc.a.codec.scales, desc.a.codec.bits, desc.a.across != 0},
                             {right.data, right.scales, desc.b.codec.scales, desc.b.codec.bits, desc.b.across != 0},
                             desc.a.codec.block_size == 0, desc.block_size, bias, result, size, panels, threads);
  else if (const Bfloat16Gemm* gemm = bfloat16_gemm(desc.gemm))
    gemm->multiply({(const uint16_t*)left.data, desc.a.row_stride, desc.a.column_stride},
                   {(const uint16_t*)right.data, desc.b.column_stride, desc.b.row_stride}, bias, result, size, panels,
                   threads);
  if (after) quantize_tensor(codec, result.to, out, threads, seed + desc.result_seed);
}

}  // namespace

void linear_forward(const LinearForwardDesc& desc, const uint8_t* x, const uint8_t* w, const float* bias,
                    uint8_t* y, uint8_t* codes, uint8_t* scales, uint8_t* scratch, int threads, uint64_t seed) {
  if (codes) {
    Encoding stash(desc.stash, x, codes, scales, threads, seed + desc.stash_seed);
    Encoding operand = encoding(desc.output, desc.output.a, x, scratch, threads, seed);
    encode_both(stash, operand, threads);
  }
  matmul(desc.output, {codes ? nullptr : x}, {w}, bias, y, scratch, threads, seed);
}

void linear_backward(const LinearBackwardDesc& desc, const uint8_t* dy, const uint8_t* w, const uint8_t* codes,
                     const uint8_t* scales, uint8_t* dx, uint8_t* dw, uint8_t* scratch, int threads, uint64_t seed) {
  const MatMulDesc &of_dx = desc.input_gradient, &of_dw = desc.weight_gradient;
  const bool transposed = of_dw.a.packed, both = dx && dw;
  if (both) {
    Encoding for_dx = encoding(of_dx, of_dx.a, dy, scratch, threads, seed);
    Encoding for_dw = encoding(of_dw, transposed ? of_dw.b : of_dw.a, dy, scratch, threads, seed);
    encode_both(for_dx, for_dw, threads);
  }
  const OperandData gradient{both ? nullptr : dy}, x{codes, scales};
  if (dx) matmul(of_dx, gradient, {w}, nullptr, dx, scratch, threads, seed);
  if (dw)
    matmul(of_dw, transposed ? x : gradient, transposed ? gradient : x, nullptr, dw, scratch, threads, seed);
}
