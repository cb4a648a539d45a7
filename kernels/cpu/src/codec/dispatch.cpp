// Picks an instruction set's kernels.
#include "codec.h"

namespace {

const IsaKernels* const ISAS[] = {
#ifdef DSQ_X86
    &AVX512, &AVX2,
#endif
    &PORTABLE,
};
constexpr int ISA_COUNT = sizeof ISAS / sizeof *ISAS;

}  // namespace

const IsaKernels* isa_kernels(int index) { return index < ISA_COUNT ? ISAS[index] : nullptr; }
