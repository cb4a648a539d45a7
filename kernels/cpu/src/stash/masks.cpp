// Deals the work on masks to threads.
#include "../codec/codec.h"

#include "../threads.h"

void run_mask(int isa, void (*IsaKernels::*kernel)(const MaskJob&, int64_t, int64_t), const MaskJob& job, int64_t count,
              int threads) {
  constexpr int64_t piece = VALUES_PER_THREAD;
  static_assert(piece % 32 == 0, "a piece begins with a word of bits");
  const auto run = isa_kernels(isa)->*kernel;
  parallel_for(ceil_div(count, piece), threads, [&](int64_t i) {
    const int64_t begin = i * piece, end = begin + piece;
    run(job, begin, end < count ? end : count);
  });
}
