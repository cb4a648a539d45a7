// The choice of the instructions that multiply packed codes.
#include "../../choice.h"
#include "../gemm.h"

namespace {

const IntegerGemm* const GEMMS[] = {
#ifdef DSQ_X86
    &INTEGER_AVX512, &INTEGER_AVXVNNI, &INTEGER_AVX2,
#elif defined DSQ_ARM
    &INTEGER_NEON,
#endif
    nullptr,
};
Choice<IntegerGemm> choice(GEMMS);

}  // namespace

const char* integer_gemm_name(int index, int* usable) { return choice.name(index, usable); }
void use_integer_gemm(int index) { choice.use(index); }
const IntegerGemm* integer_gemm() { return choice.best(); }
