// Deals the work on groups with a low and a step of their own to threads.
#include "../codec/codec.h"

#include <cmath>

#include "../threads.h"

namespace {

constexpr int64_t TILES_PER_PIECE = 256;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Kernel> void deal_out(Kernel kernel, const AffineJob& job, int64_t count, int64_t piece, int threads) {
  parallel_for(ceil_div(count, piece), threads,
               [&](int64_t i) { kernel(job, i * piece, least((i + 1) * piece, count)); });
}

int64_t tiles(const AffineDesc& p) { return ceil_div(p.count, TILE); }

// An exponential mean, which the first value starts.
struct Mean {
  float old_share, new_share;
  float moved(float mean, float value) const { return std::isnan(mean) ? value : old_share * mean + new_share * value; }
};

}  // namespace

void affine_pack(const AffineDesc& desc, const void* x, float* running, double decay, float* ranges, uint8_t* codes,
                 int threads, uint64_t seed) {
  float *const low = ranges, *const step = ranges + desc.groups;
  const AffineJob job{&desc, (void*)x, codes, low, step, seed};
  const IsaKernels& isa = *isa_kernels(desc.isa);
  const float levels = (float)((1 << desc.bits) - 1);
  if (running) {
    deal_out(isa.affine_extents, job, desc.groups, least(AFFINE_GROUPS, 1 + desc.groups / threads), threads);
    float *const alpha = running, *const beta = running + desc.groups;
    const Mean mean{(float)decay, (float)(1 - decay)};
    for (int64_t g = 0; g < desc.groups; g++) {
      const float width = step[g] - low[g];
      if (std::isfinite(width) && std::isfinite(low[g])) {
        alpha[g] = mean.moved(alpha[g], width);
        beta[g] = mean.moved(beta[g], low[g]);
        low[g] = beta[g];
        step[g] = alpha[g] / levels;
      } else {
        low[g] = step[g] = NAN;  // an overflow shows in this tensor, and leaves the means as they were
      }
    }
    return deal_out(isa.affine_pack, job, tiles(desc), TILES_PER_PIECE, threads);
  }
  // each piece is read twice, the second time from a near cache; AFFINE_GROUPS runs are whole tiles
  static_assert(AFFINE_GROUPS % TILE == 0, "a piece begins with a tile");
  const auto both = [&](const AffineJob& job, int64_t begin, int64_t end) {
    isa.affine_extents(job, begin, end);
    for (int64_t g = begin; g < end; g++) step[g] = (step[g] - low[g]) / levels;
    isa.affine_pack(job, begin * desc.run / TILE, ceil_div(least(end * desc.run, desc.count), TILE));
  };
  deal_out(both, job, desc.groups, AFFINE_GROUPS, threads);
}

void affine_unpack(const AffineDesc& desc, const uint8_t* codes, float* ranges, void* out, int threads) {
  const AffineJob job{&desc, out, (uint8_t*)codes, ranges, ranges + desc.groups, 0};
  deal_out(isa_kernels(desc.isa)->affine_unpack, job, tiles(desc), TILES_PER_PIECE, threads);
}
