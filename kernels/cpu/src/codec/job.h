// One call of a codec or mask kernel: its operation, its memory, and its division into tasks.
// Names and numerics are those of kernels/reference, which defines every bit.
#pragma once

#include <atomic>

#include "../api.h"
#include "../division.h"

// Columns that are worked on at a time: four groups of 16, 8 * bits bytes of codes.
constexpr int TILE = 64;
// Columns that random numbers are drawn for at a time, and the least that a task takes.
constexpr int CHUNK = 128;
// Chunks that go through one stage of the work before any goes through the next: from load to store a value passes a
// long chain of dependent instructions, and a processor overlaps only the short chains of one stage well. Values that
// are read twice are still in the first-level cache.
constexpr int BATCH = 8, BATCH_COLUMNS = BATCH * CHUNK;
// The same for blocks along the rows, which are to stay in that cache too.
constexpr int BATCH_OF_ROWS = 4;

// The largest magnitudes of blocks, as bits: the largest of all and the smallest that is not 0.
struct Magnitudes {
  std::atomic<uint32_t> most{0}, least{~0u};
};

struct CodecJob {
  const CodecDesc* desc;
  const void* values = nullptr;  // input of quantize and pack
  void* out = nullptr;           // values of quantize and unpack
  uint8_t* codes = nullptr;
  uint8_t* exponents = nullptr;  // the scales
  uint64_t seed = 0;
  int32_t tensor_exponent = 0;  // with block 0, and of SIGNED_E4M3: the one stored exponent
  bool past_caches = false;     // write values with streaming stores
  bool prefetch = false;        // or prefetch the cache lines they go to
  bool from_memory = false;     // the input is too large to be in a cache
  Magnitudes* found = nullptr;  // for SIGNED_E4M3, the result of the encoder's search, or null
};

// Of a format that is data (grids.h); `exponents` are its scales.
struct GridJob : CodecJob {
  const GridDesc* grid;
  uint8_t* pairs = nullptr;  // behind the scales of the blocks: the bits of pairs, or the scale of the tensor
  uint32_t largest = 0;      // bits of the tensor's largest magnitude, where a scale needs it

  explicit GridJob(const GridDesc& desc) : CodecJob{&desc.codec}, grid(&desc) {}
};

// One bit a value (masks.h).
struct MaskJob {
  void* values;
  uint8_t* bits;
  int32_t dtype;
  float low = 0, high = 0;       // of pack: the open values lie between; NaN: no limit
  bool nan_is_open = false;      // of pack
  const void* source = nullptr;  // of apply: the values let through, or 0; of ReLU: its argument; of scale: the values
  float factor = 1;              // of scale: of values whose bit is 1; others are multiplied by 0
};

// Draws from PyTorch's generator (bernoulli.h): whether each is below the threshold, in bits or bytes.
struct BernoulliJob {
  void* generator;
  int64_t count;
  uint64_t threshold;
  bool bytes;
  uint8_t* out;
};

// Groups whose extents are found at a time.
constexpr int AFFINE_GROUPS = 64;

// Codes between a low and a high value of each group (affine.h).
struct AffineJob {
  const AffineDesc* desc;
  void* values;
  uint8_t* codes;
  float *low, *step;  // of each group; `step` takes the largest value where extents are found
  uint64_t seed;
};

// One instruction set's kernels. Each works on tasks [begin, end) of a job and may run beside others on the rest.
struct IsaKernels {
  const char* name;
  bool (*usable)();
  uint32_t (*largest)(const CodecJob&, int64_t begin, int64_t end);  // bits of max |x| over values begin..end
  void (*quantize)(const CodecJob&, int64_t begin, int64_t end);
  void (*pack)(const CodecJob&, int64_t begin, int64_t end);
  void (*unpack)(const CodecJob&, int64_t begin, int64_t end);
  void (*quantize_grid)(const GridJob&, int64_t begin, int64_t end);
  void (*pack_grid)(const GridJob&, int64_t begin, int64_t end);
  void (*unpack_grid)(const GridJob&, int64_t begin, int64_t end);
  void (*mask)(const MaskJob&, int64_t begin, int64_t end);  // of values; begin a multiple of 32, as below
  void (*unmask)(const MaskJob&, int64_t begin, int64_t end);
  void (*apply_mask)(const MaskJob&, int64_t begin, int64_t end);
  void (*relu)(const MaskJob&, int64_t begin, int64_t end);  // of float32
  void (*scale_mask)(const MaskJob&, int64_t begin, int64_t end);
  void (*bernoulli)(const BernoulliJob&);  // all of it, as each draw follows from the one before
  void (*affine_extents)(const AffineJob&, int64_t begin, int64_t end);  // of groups, at most AFFINE_GROUPS
  void (*affine_pack)(const AffineJob&, int64_t begin, int64_t end);     // of tiles
  void (*affine_unpack)(const AffineJob&, int64_t begin, int64_t end);
};

extern const IsaKernels PORTABLE;
#ifdef DSQ_X86
extern const IsaKernels AVX2, AVX512;
#endif

// Anonymous, so that each file has its own: they are compiled for different processors, which the linker must not mix.
namespace {

// How a job is cut into tasks: shared by the kernels, which run them, and by codec.cpp, which deals them out.
struct Tasks {
  int64_t blocks;   // of rows: single rows, or the blocks of rows
  int64_t strips;   // of columns
  int64_t width;    // columns of a strip: a multiple of CHUNK and, along columns, of the block
  int64_t height;   // rows of a block
  int64_t per_outer;
  int64_t count() const { return blocks * strips; }
};

inline bool blocks_along_rows(const CodecDesc& p) { return p.along_rows && p.block_size != 0; }

// Whether bfloat16 holds every value (dsq/formats: significand_bits).
inline bool exact_in_bf16(const CodecDesc& p) { return p.bits <= (p.scales == SIGNED_E4M3 ? 5 : 9); }

inline Tasks encode_tasks(const CodecDesc& p) {
  Tasks t;
  t.width = CHUNK;
  t.height = 1;
  if (blocks_along_rows(p)) {
    t.height = p.block_size;
  } else if (p.block_size) {
    const int64_t twos = p.block_size & -p.block_size;
    t.width = p.block_size / (twos < CHUNK ? twos : CHUNK) * (int64_t)CHUNK;  // the least common multiple
  }
  t.per_outer = ceil_div(p.rows, t.height);
  t.blocks = p.outer * t.per_outer;
  t.strips = ceil_div(p.columns, t.width);
  return t;
}

// Tiles of columns, of one row or of a block of rows.
inline int64_t decode_tasks(const CodecDesc& p) {
  return p.outer * ceil_div(p.rows, blocks_along_rows(p) ? p.block_size : 1) * ceil_div(p.columns, TILE);
}

struct GridTasks {
  int64_t width;         // columns of a task: all, or a multiple of CHUNK and of the block
  int64_t across, down;  // tasks side by side, and rows of blocks of an outer one
  int64_t count;
};

inline GridTasks grid_tasks(const GridDesc& g) {
  const CodecDesc& p = g.codec;
  const int64_t columns = g.one_block ? 1 : g.block_columns, twos = columns & -columns;
  const int64_t step = columns / (twos < CHUNK ? twos : CHUNK) * (int64_t)CHUNK, wished = g.block_rows > 1 ? 256 : 1024;
  GridTasks t;
  t.width = step < wished ? wished / step * step : step;
  if (t.width > p.columns) t.width = p.columns;
  t.across = p.columns ? ceil_div(p.columns, t.width) : 0;
  t.down = ceil_div(p.rows, g.block_rows);
  t.count = p.outer * t.down * t.across;
  return t;
}

// Whether the factors of a block are those of whole groups of 16 columns.
inline bool in_groups(const GridDesc& g) {
  return g.one_block || g.block_columns % 16 == 0 || g.block_columns >= g.codec.columns;
}

}  // namespace
