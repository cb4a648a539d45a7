// The library's entries that another file of it calls too.
#pragma once

#include "job.h"
#include "threads.h"

EXPORT void dsq_quantize(const Plan* plan, const void* x, void* out, int threads, uint64_t seed);
EXPORT void dsq_pack(const Plan* plan, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed);
EXPORT void dsq_unpack(const Plan* plan, const uint8_t* codes, const uint8_t* exponents, void* out, int threads);
EXPORT void dsq_gemm_bf16(const uint16_t* a, int64_t a_row, int64_t a_depth, const uint16_t* b, int64_t b_depth,
                          int64_t b_column, const float* bias, float* c, int64_t rows, int64_t columns, int64_t depth,
                          uint32_t* scratch, int threads);
EXPORT void dsq_gemm_boxes(const uint8_t* a_codes, const uint8_t* a_exponents, int a_bits, int a_across,
                           const uint8_t* b_codes, const uint8_t* b_exponents, int b_bits, int b_across,
                           int one_exponent, int box, const float* bias, float* c, int64_t rows, int64_t columns,
                           int64_t depth, uint32_t* scratch, int threads);
