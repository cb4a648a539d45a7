// Which machine's instructions multiply packed codes.
#include <atomic>

#include "gemm.h"

namespace {

const IntegerGemm* const GEMMS[] = {
#ifdef DSQ_X86
    &INTEGER_AVX512, &INTEGER_AVX2,
#elif defined DSQ_ARM
    &INTEGER_NEON,
#endif
    nullptr,
};
constexpr int COUNT = sizeof GEMMS / sizeof *GEMMS - 1;

const IntegerGemm* best() {
  for (const IntegerGemm* const* gemm = GEMMS; *gemm; gemm++)
    if ((*gemm)->usable()) return *gemm;
  return nullptr;
}

std::atomic<const IntegerGemm*> used{nullptr};

}  // namespace

const IntegerGemm* integer_gemm(int index) { return index < COUNT ? GEMMS[index] : nullptr; }

const IntegerGemm* integer_gemm() {
  if (!used) used = best();
  return used;
}

void use_integer_gemm(int index) { used = GEMMS[index]; }
