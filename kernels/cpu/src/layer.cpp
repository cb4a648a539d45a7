// The passes of a linear layer, each in one call: a small layer's calls would cost more than its work, and what lies
// between the kernels stays in memory that is kept.
#include "entries.h"

namespace {

// Mirrored by native_layer.py, as are the others.
struct Factor {
  Plan plan;                   // how it is quantised; bfloat16 comes out where the product is of values
  int64_t at, exponents_at;    // where in the scratch memory its values, or its codes and exponents, go
  int64_t row_stride, column_stride;  // of its values, as the product sees it (perhaps transposed)
  uint64_t seed;               // added to the call's
  int32_t packed;              // it comes in codes and exponents
  int32_t across;              // a row of its codes holds one step of the contraction
};

enum Way { CODES, BFLOAT16, FLOAT32_BY_TORCH };  // the last: the factors are made ready, and torch multiplies them

struct Product {
  Factor a, b;
  Plan result;  // bits 0: the product stays as it is
  uint64_t result_seed;
  int64_t rows, columns, depth, panels_at;
  int32_t way;
  int32_t box;  // values summed as integers, where the product is of codes
};

struct Forward {
  Product output;
  Plan stash;  // how x is packed for the backward
  uint64_t stash_seed;
};

struct Backward {
  Product input_gradient, weight_gradient;
};

struct Ready {
  const uint8_t *data, *exponents;
};

Ready ready(const Factor& f, bool codes, const uint8_t* data, const uint8_t* exponents, uint8_t* scratch, int threads,
            uint64_t seed) {
  if (codes && f.packed) return {data, exponents};
  uint8_t *to = scratch + f.at, *exponents_to = scratch + f.exponents_at;
  if (codes) dsq_pack(&f.plan, data, to, exponents_to, threads, seed + f.seed);
  else if (f.packed) dsq_unpack(&f.plan, data, exponents, to, threads);
  else dsq_quantize(&f.plan, data, to, threads, seed + f.seed);
  return {to, exponents_to};
}

// out = quantised(a) quantised(b) + bias, quantised if so asked. `a` is values; `b` is values, or codes with exponents.
void multiply(const Product& p, const uint8_t* a, const uint8_t* b, const uint8_t* b_exponents, const float* bias,
              float* out, uint8_t* scratch, int threads, uint64_t seed) {
  const Ready left = ready(p.a, p.way == CODES, a, nullptr, scratch, threads, seed);
  const Ready right = ready(p.b, p.way == CODES, b, b_exponents, scratch, threads, seed);
  uint32_t* panels = (uint32_t*)(scratch + p.panels_at);
  if (p.way == CODES)
    dsq_gemm_boxes(left.data, left.exponents, p.a.plan.bits, p.a.across, right.data, right.exponents, p.b.plan.bits,
                   p.b.across, p.a.plan.box == 0, p.box, bias, out, p.rows, p.columns, p.depth, panels, threads);
  else if (p.way == BFLOAT16)
    dsq_gemm_bf16((const uint16_t*)left.data, p.a.row_stride, p.a.column_stride, (const uint16_t*)right.data,
                  p.b.row_stride, p.b.column_stride, bias, out, p.rows, p.columns, p.depth, panels, threads);
  if (p.result.bits) dsq_quantize(&p.result, out, out, threads, seed + p.result_seed);
}

}  // namespace

// y = x w^T + bias; x packed into `codes` and `exponents` too, but where codes is null.
EXPORT void dsq_layer_forward(const Forward* pass, const uint8_t* x, const uint8_t* w, const float* bias, float* y,
                              uint8_t* codes, uint8_t* exponents, uint8_t* scratch, int threads, uint64_t seed) {
  if (codes) dsq_pack(&pass->stash, x, codes, exponents, threads, seed + pass->stash_seed);
  multiply(pass->output, x, w, nullptr, bias, y, scratch, threads, seed);
}

// dx = dy w, and dw = dy^T x from the packed x; neither where it is null.
EXPORT void dsq_layer_backward(const Backward* pass, const uint8_t* dy, const uint8_t* w, const uint8_t* codes,
                               const uint8_t* exponents, float* dx, float* dw, uint8_t* scratch, int threads,
                               uint64_t seed) {
  if (dx) multiply(pass->input_gradient, dy, w, nullptr, nullptr, dx, scratch, threads, seed);
  if (dw) multiply(pass->weight_gradient, dy, codes, exponents, nullptr, dw, scratch, threads, seed);
}
