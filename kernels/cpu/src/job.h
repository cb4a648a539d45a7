// One call of a kernel: what it is asked to do (Plan, shared with native_plan.py) and on which memory (Job).
// Names and numerics are those of kernels/reference.py, which defines every bit.
#pragma once

#include <stdint.h>

enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, BYTE = 3 };  // the last of masks only

// Mirrored by native_plan.py's Plan, field by field: a Grid, a Layout and the caller's choices.
struct Plan {
  int64_t outer, rows, columns;
  int64_t row_bytes;   // of a row of codes
  int32_t along_rows;  // boxes run along the rows (the token axis), else along the columns
  int32_t bits;
  int32_t box;         // 0: one box for the tensor
  int32_t exponent;    // with box 0: the stored exponent of a static binary point, or -1
  int32_t dtype;       // of the values: input of quantize and pack, output of unpack
  int32_t out_dtype;   // of quantize's output
  int32_t stochastic;
  int32_t isa;         // index into the table of api.cpp
};

constexpr int NAN_EXPONENT = 255;
// Columns that are worked on at a time: four groups of 16, 8 * bits bytes of codes.
constexpr int STEP = 64;
// Columns that random numbers are drawn for at a time, and the least that a task takes.
constexpr int CHUNK = 128;
// Chunks that go through one stage of the work before any goes through the next: a value's way from load to store is a
// long chain, and a processor overlaps only the short chains of one stage well. What is read twice is still in the
// first cache.
constexpr int BATCH = 4, WIDE = BATCH * CHUNK;

struct Job {
  const Plan* plan;
  const void* values;  // input of quantize and pack
  void* out;           // values of quantize and unpack
  uint8_t* codes;
  uint8_t* exponents;
  uint64_t seed;
  int32_t tensor_exponent;  // with box 0: the one stored exponent
  bool stream;              // write values past the caches
  bool ask;                 // or ask for the lines they go to, ahead
  bool far;                 // the input comes from memory
};

// One bit a value (masks.h).
struct MaskJob {
  void* values;
  uint8_t* bits;
  int32_t dtype;
  float low, high;     // of pack: the open values lie between; NaN: no limit
  bool nan_is_open;    // of pack
  float closed, open;  // of unpack: the two values
  const void* source;  // of apply: the values let through, or 0; of ReLU: its argument
};

// One instruction set's kernels; each works on tasks [begin, end) of a job and may run beside others on the rest.
struct Isa {
  const char* name;
  bool (*usable)();
  uint32_t (*largest)(const Job&, int64_t begin, int64_t end);  // bits of max |x| over values begin..end
  void (*quantize)(const Job&, int64_t begin, int64_t end);
  void (*pack)(const Job&, int64_t begin, int64_t end);
  void (*unpack)(const Job&, int64_t begin, int64_t end);
  void (*mask)(const MaskJob&, int64_t begin, int64_t end);  // of values; begin a multiple of 32, as below
  void (*unmask)(const MaskJob&, int64_t begin, int64_t end);
  void (*apply_mask)(const MaskJob&, int64_t begin, int64_t end);
  void (*relu)(const MaskJob&, int64_t begin, int64_t end);  // of float32
};

extern const Isa PORTABLE;
#ifdef DSQ_X86
extern const Isa AVX2, AVX512;
#endif

// In each file its own: compiled for different processors, the linker must never mix them.
namespace {

// How a job is cut into tasks: shared by the kernels, which run them, and by api.cpp, which deals them out.
struct Tasks {
  int64_t blocks;   // of rows: single rows, or the boxes of rows
  int64_t strips;   // of columns
  int64_t width;    // columns of a strip: a multiple of CHUNK and, along columns, of the box
  int64_t height;   // rows of a block
  int64_t per_outer;
  int64_t count() const { return blocks * strips; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool boxes_along_rows(const Plan& p) { return p.along_rows && p.box != 0; }

inline Tasks encode_tasks(const Plan& p) {
  Tasks t;
  t.width = CHUNK;
  t.height = 1;
  if (boxes_along_rows(p)) {
    t.height = p.box;
  } else if (p.box) {
    const int64_t twos = p.box & -p.box;
    t.width = p.box / (twos < CHUNK ? twos : CHUNK) * (int64_t)CHUNK;  // the least common multiple
  }
  t.per_outer = ceil_div(p.rows, t.height);
  t.blocks = p.outer * t.per_outer;
  t.strips = ceil_div(p.columns, t.width);
  return t;
}

// Steps of columns, of one row or of a box of rows.
inline int64_t decode_tasks(const Plan& p) {
  return p.outer * ceil_div(p.rows, boxes_along_rows(p) ? p.box : 1) * ceil_div(p.columns, STEP);
}

}  // namespace
