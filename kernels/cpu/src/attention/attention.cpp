// The choice of the instruction set's kernels for attention.
#include "attention.h"

#include "../choice.h"

namespace {

const AttentionKernels* const KERNELS[] = {
#ifdef DSQ_X86
    &ATTENTION_AVX512, &ATTENTION_AVX2,
#endif
    nullptr,
};
Choice<AttentionKernels> choice(KERNELS);

}  // namespace

const char* attention_name(int index, int* usable) { return choice.name(index, usable); }
void use_attention(int index) { choice.use(index); }
const AttentionKernels& attention_kernels() { return *choice.best(); }
