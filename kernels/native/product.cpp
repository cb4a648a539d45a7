// A product of two matrices that are quantised on the way, in one call: a small layer's calls would cost more than its
// work, and what lies between the kernels stays in memory that is kept.
#include "entries.h"

namespace {

// Mirrored by native_product.py, as is Product.
struct Factor {
  Plan plan;                   // how it is quantised; bfloat16 comes out where the product is of values
  int64_t at, exponents_at;    // where in the scratch memory its values, or its codes and exponents, go
  int64_t row_stride, column_stride;  // of its values, as the product sees it (perhaps transposed)
  uint64_t seed;               // added to the call's
  int32_t packed;              // it comes in codes and exponents
  int32_t across;              // a row of its codes holds one step of the contraction
};

struct Product {
  Factor a, b;
  Plan result;  // bits 0: the product stays as it is
  uint64_t result_seed;
  int64_t rows, columns, depth, panels_at;
  int32_t box;  // values summed as integers: the product is of codes; 0: of values
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

}  // namespace

// out = quantised(a) quantised(b) + bias, quantised if so asked. `a` is values; `b` is values, or codes with exponents.
EXPORT void dsq_product(const Product* p, const uint8_t* a, const uint8_t* b, const uint8_t* b_exponents,
                        const float* bias, float* out, uint8_t* scratch, int threads, uint64_t seed) {
  const Ready left = ready(p->a, p->box, a, nullptr, scratch, threads, seed);
  const Ready right = ready(p->b, p->box, b, b_exponents, scratch, threads, seed);
  uint32_t* panels = (uint32_t*)(scratch + p->panels_at);
  if (p->box)
    dsq_gemm_boxes(left.data, left.exponents, p->a.plan.bits, p->a.across, right.data, right.exponents, p->b.plan.bits,
                   p->b.across, p->a.plan.box == 0, p->box, bias, out, p->rows, p->columns, p->depth, panels, threads);
  else
    dsq_gemm_bf16((const uint16_t*)left.data, p->a.row_stride, p->a.column_stride, (const uint16_t*)right.data,
                  p->b.row_stride, p->b.column_stride, bias, out, p->rows, p->columns, p->depth, panels, threads);
  if (p->result.bits) dsq_quantize(&p->result, out, out, threads, seed + p->result_seed);
}
