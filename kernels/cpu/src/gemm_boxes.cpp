// C = A B from packed block floating point, boxes along the contraction, as hardware for the format computes it: an
// exact integer dot product over each box, times the two boxes' steps, summed in float32 (AVX512_VNNI). Codes of at
// most 8 bits multiply as bytes, four to an element of a panel; wider ones as 16-bit integers, words, two to an
// element. Narrow codes leave room to be shifted, exactly, so that the boxes of a run share an exponent: of bytes, one
// integer dot product takes the run; of words, which A's codes may fill, the boxes of B share a step that its column is
// multiplied by at the end.
#include "entries.h"
#include "panels.h"

namespace {

constexpr int ROWS = 6, GROUP = 32;   // rows and columns of a register tile: 12 integer and 12 float accumulators
constexpr int TASK_ROWS = 3 * GROUP;  // of C in a task: their lines of A stay in the second-level cache
constexpr int LINE = 128;             // elements of a line in a panel: 16 KiB, which stay in the first-level cache
constexpr int RUN = 64;               // steps of a run; else it is all of the line's, or a box
constexpr int UNROLLED = 8;           // elements of a long run in a pass of the innermost loop
constexpr int ROWS_AHEAD = 16;        // rows of codes that are asked for before they are read
constexpr int ONE_STEP_BOX = 16;      // of words, whose tiles know B's boxes to share a step
static_assert(RUN % (4 * UNROLLED) == 0, "a run is unrolled without rest");
static_assert(TASK_ROWS % ROWS == 0 && TASK_ROWS % GROUP == 0, "a task takes whole tiles and whole groups of lines");

// Steps of an element, and of a line.
template <bool bytes> constexpr int PER_ELEMENT = bytes ? 4 : 2;
template <bool bytes> constexpr int STEPS = LINE * PER_ELEMENT<bytes>;

// A packed matrix as a GEMM reads it: lines (rows of A, columns of B) along the depth. kernels/grid.py says how codes
// and exponents lie.
struct Packed {
  const uint8_t* codes;
  const uint8_t* exponents;  // one for each box, or one for the tensor
  int32_t bits, box;
  bool one_exponent;
  bool across;  // a row of codes holds one step of every line, else one line's steps
  int64_t lines, depth;

  // Of a block of `steps` steps, those that tiles read: whole runs, or boxes where these are longer.
  int steps_read(int steps) const {
    const int whole = box < RUN ? RUN : box;
    return (int)ceil_div(steps, whole) * whole;
  }
  int64_t row_bytes() const { return ceil_div((across ? lines : depth) * bits, 8); }
  // From one line's exponent to the next line's, and from one box's to the next box's.
  int64_t to_next_line() const { return one_exponent ? 0 : across ? 1 : ceil_div(depth, box); }
  int64_t to_next_box() const { return one_exponent ? 0 : across ? lines : 1; }
};

// 16 codes of any width in 32-bit lanes; zeros after `count` of them.
inline __m512i sixteen(const uint8_t* from, int count, int bits) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bit = _mm512_mullo_epi32(lane, _mm512_set1_epi32(bits));
  const __m512i word = _mm512_srli_epi32(bit, 4);  // a code lies in this 16-bit word and the next
  const __m512i words = _mm512_or_si512(word, _mm512_slli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(1)), 16));
  const __m512i left = _mm512_sub_epi32(_mm512_set1_epi32(32 - bits), _mm512_and_si512(bit, _mm512_set1_epi32(15)));
  const __mmask32 bytes = first32((int)ceil_div(least(count, 16) * bits, 8));
  const __m512i stored = _mm512_zextsi256_si512(_mm256_maskz_loadu_epi8(bytes, from));
  const __m512i top = _mm512_sllv_epi32(_mm512_permutexvar_epi16(words, stored), left);
  return _mm512_maskz_srav_epi32(first16(count), top, _mm512_set1_epi32(32 - bits));
}

// 32 codes as 16-bit integers, from a byte's first bit on; zeros after `count` of them.
inline __m512i codes16(const uint8_t* from, int count, int bits) {
  const int bytes = (int)ceil_div(least(count, 32) * bits, 8);
  if (bits == 16) return _mm512_maskz_loadu_epi16(first32(count), from);
  __m512i codes;
  if (bits == 8) {
    codes = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first32(bytes), from));
  } else if (bits == 4) {
    // a byte in both halves of a lane, then each half's nibble to its top and back
    const __m512i lanes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(twice, _mm512_set1_epi32(8 << 16 | 12)), 12);
  } else if (bits == 2) {
    const __m512i lanes = _mm512_cvtepu8_epi64(_mm_maskz_loadu_epi8(first16(bytes), from));
    const __m512i twice = _mm512_or_si512(lanes, _mm512_slli_epi64(lanes, 16));
    const __m512i four = _mm512_or_si512(twice, _mm512_slli_epi64(twice, 32));
    codes = _mm512_srai_epi16(_mm512_sllv_epi16(four, _mm512_set1_epi64(8LL << 48 | 10LL << 32 | 12 << 16 | 14)), 14);
  } else {
    const __m256i low = _mm512_cvtepi32_epi16(sixteen(from, count, bits));
    const __m256i high = _mm512_cvtepi32_epi16(sixteen(from + 2 * bits, count - 16, bits));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  return _mm512_maskz_mov_epi16(first32(count), codes);
}

// 64 codes of at most 8 bits as bytes.
inline __m512i codes8(const uint8_t* from, int count, int bits) {
  if (bits == 8) return _mm512_maskz_loadu_epi8(first64(count), from);
  const __m256i low = _mm512_cvtepi16_epi8(codes16(from, count, bits));
  const __m256i high = _mm512_cvtepi16_epi8(codes16(from + 4 * bits, count - 32, bits));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// 16 elements of a row of codes, from code `first` (a multiple of 32) on; zeros after `count` codes.
template <bool bytes> __m512i elements_of(const uint8_t* row, int64_t first, int count, int bits) {
  if (count <= 0) return __m512i();
  const uint8_t* from = row + first / 8 * bits;
  if constexpr (bytes) return codes8(from, count, bits);
  else return codes16(from, count, bits);
}

// 32 lines' codes at two steps of the depth, as bytes side by side.
inline __m512i byte_pairs(__m512i even, __m512i odd) {
  return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, even, _mm512_slli_epi16(odd, 8));
}

// The codes of at most GROUP lines from `line` on, over `depth` steps from k on, as the tiles read B: a panel. Zeros
// after them, as far as tiles read.
template <bool bytes> void fill_panel(const Packed& x, int64_t line, int64_t k, int depth, uint32_t* panel) {
  constexpr int per_element = PER_ELEMENT<bytes>;
  const int lines = least(GROUP, x.lines - line);
  const int64_t row_bytes = x.row_bytes();
  if (x.across) {
    const uint8_t* row = x.codes + k * row_bytes;
    auto codes = [&](int i) {
      // the processor does not foresee the way from row to row
      __builtin_prefetch(row + (i + ROWS_AHEAD) * row_bytes + line / 8 * x.bits);
      return elements_of<false>(row + i * row_bytes, line, i < depth ? lines : 0, x.bits);
    };
    if constexpr (bytes)
      panel_of_rows<GROUP>([&](int i) { return byte_pairs(codes(2 * i), codes(2 * i + 1)); }, (depth + 1) / 2, panel);
    else panel_of_rows<GROUP>(codes, depth, panel);
  } else {
    const uint8_t* row = x.codes + line * row_bytes;
    panel_of_lines<GROUP>(
        [&](int i, int first) {
          if (i >= lines) return __m512i();
          return elements_of<bytes>(row + i * row_bytes, k + first * per_element, depth - first * per_element, x.bits);
        },
        (int)ceil_div(depth, per_element), panel);
  }
  const int64_t filled = ceil_div(depth, per_element);
  memset(panel + filled * GROUP, 0, (size_t)(4 * (x.steps_read(depth) / per_element - filled) * GROUP));
}

// The same one line after another, as the tiles read A.
template <bool bytes> void fill_lines(const Packed& x, int64_t line, int64_t k, int depth, uint32_t* to) {
  constexpr int per_element = PER_ELEMENT<bytes>;
  const int lines = least(GROUP, x.lines - line), used = (int)(ceil_div(depth, x.box) * x.box / per_element);
  if (!x.across) {
    const uint8_t* row = x.codes + line * x.row_bytes();
    for (int i = 0; i < lines; i++, row += x.row_bytes(), to += LINE)
      for (int e = 0; e < used; e += 16)
        _mm512_storeu_si512(to + e, elements_of<bytes>(row, k + e * per_element, depth - e * per_element, x.bits));
    return;
  }
  alignas(64) uint32_t panel[GROUP * LINE];
  fill_panel<bytes>(x, line, k, depth, panel);
  for (int first = 0; first < lines; first += 16)
    for (int at = 0; at < used; at += 16) {
      __m512i r[16];
      for (int e = 0; e < 16; e++)
        r[e] = at + e < used ? _mm512_load_si512(panel + (at + e) * GROUP + first) : _mm512_setzero_si512();
      transpose16(r);
      for (int i = 0; i < 16 && first + i < lines; i++)
        _mm512_storeu_si512(to + (first + i) * LINE + at, r[i]);
    }
}

// The stored exponents of a group's lines over a panel's steps, and how far its codes are to be shifted to have them.
struct Exponents {
  int lines, boxes, box;
  bool shifted = false;
  alignas(GROUP) uint8_t stored[LINE][GROUP];  // a box of every line, then the next of every line
  alignas(GROUP) uint8_t shift[LINE][GROUP];

  Exponents(const Packed& x, int64_t line, int64_t k, int steps)
      : lines(least(GROUP, x.lines - line)), boxes((int)ceil_div(steps, x.box)), box(x.box) {
    const int64_t next_line = x.to_next_line(), next_box = x.to_next_box();
    const uint8_t* from = x.exponents + line * next_line + k / x.box * next_box;
    if (lines < GROUP) memset(stored, 0, sizeof stored[0] * (size_t)boxes);
    if (next_line == 1) {
      for (int b = 0; b < boxes; b++) memcpy(stored[b], from + b * next_box, (size_t)lines);
      return;
    }
    for (int i = 0; i < lines; i++)
      for (int b = 0; b < boxes; b++) stored[b][i] = from[i * next_line + b * next_box];
  }

  // Every line's least exponent of boxes first..end - 1, and its largest.
  void range(int first, int end, __m256i& low, __m256i& high) const {
    low = high = _mm256_load_si256((const __m256i*)stored[first]);
    for (int b = first + 1; b < end; b++) {
      const __m256i here = _mm256_load_si256((const __m256i*)stored[b]);
      low = _mm256_min_epu8(low, here), high = _mm256_max_epu8(high, here);
    }
  }

  // Gives boxes of zeros, which may have any, their neighbours' exponents: their own, 0, would lie far below.
  // zeros(b): the lines whose box b holds zeros.
  template <class Zeros> void pass_over_zeros(const Zeros& zeros) {
    auto take_from = [&](int b, int neighbour) {
      const __m256i here = _mm256_load_si256((const __m256i*)stored[b]);
      const __mmask32 candidates = _mm256_testn_epi8_mask(here, here) & first32(lines);
      if (!candidates) return;
      const __m256i there = _mm256_load_si256((const __m256i*)stored[neighbour]);
      _mm256_store_si256((__m256i*)stored[b], _mm256_mask_mov_epi8(here, candidates & zeros(b), there));
    };
    for (int b = 1; b < boxes; b++) take_from(b, b - 1);
    for (int b = boxes - 2; b >= 0; b--) take_from(b, b + 1);
  }

  // Brings the longest runs that it can to one exponent each: all steps, or, of bytes, RUN of them. Returns a run's
  // steps.
  template <bool bytes> int share(int spare) {
    if (share_runs(STEPS<bytes> / box, spare)) return STEPS<bytes>;
    if (bytes && box < RUN && share_runs(RUN / box, spare)) return RUN;
    return box;
  }

  // Brings the boxes of each run to the least exponent among them, where codes have `spare` bits for that; a NaN's box
  // stays as it is.
  bool share_runs(int run, int spare) {
    __m256i low, high;
    for (int first = 0; first < boxes; first += run) {
      range(first, least(first + run, boxes), low, high);
      const __m256i nan = _mm256_set1_epi8((char)NAN_EXPONENT);
      if (_mm256_cmpgt_epu8_mask(_mm256_sub_epi8(high, low), _mm256_set1_epi8((char)spare))) return false;
      if (_mm256_cmpeq_epu8_mask(high, nan) & ~_mm256_cmpeq_epu8_mask(low, nan)) return false;
    }
    for (int first = 0; first < boxes; first += run) {
      const int end = least(first + run, boxes);
      range(first, end, low, high);
      for (int b = first; b < end; b++) {
        __m256i* const here = (__m256i*)stored[b];
        const __m256i by = _mm256_sub_epi8(_mm256_load_si256(here), low);
        _mm256_store_si256((__m256i*)shift[b], by);
        _mm256_store_si256(here, low);
        shifted |= !_mm256_testz_si256(by, by);
      }
    }
    return true;
  }

  // The steps of all boxes, 2^(E - (bits - 2)), each box's `stride` after the one before; NaN where a box holds one.
  // Any for lines that are not there, whose codes are 0.
  void fill_scales(int bits, float* scales, int64_t stride) const {
    for (int b = 0; b < boxes; b++, scales += stride)
      for (int half = 0; half < GROUP; half += 16) {
        const __m512i exponent = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(stored[b] + half)));
        const __m512 power = _mm512_cvtepi32_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(127 + bits - 2)));
        const __m512 step = _mm512_scalef_ps(_mm512_set1_ps(1), power), nan = _mm512_set1_ps(__builtin_nanf(""));
        const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(exponent, _mm512_set1_epi32(NAN_EXPONENT));
        _mm512_storeu_ps(scales + half, _mm512_mask_blend_ps(is_nan, step, nan));
      }
  }
};

// The lines, one after another or in a panel, whose codes in a box of `elements` are all zero.
inline __mmask32 zeros_of_lines(const uint32_t* lines, int box, int elements) {
  __mmask32 zeros = 0;
  for (int i = 0; i < GROUP; i++) {
    uint32_t any = 0;
    for (int e = 0; e < elements; e++) any |= lines[i * LINE + box * elements + e];
    zeros |= (__mmask32)(any == 0) << i;
  }
  return zeros;
}
inline __mmask32 zeros_of_panel(const uint32_t* panel, int box, int elements) {
  __m512i left = _mm512_setzero_si512(), right = left;
  for (int e = box * elements; e < (box + 1) * elements; e++) {
    left = _mm512_or_si512(left, _mm512_loadu_si512(panel + e * GROUP));
    right = _mm512_or_si512(right, _mm512_loadu_si512(panel + e * GROUP + 16));
  }
  return _mm512_testn_epi32_mask(left, left) | (__mmask32)_mm512_testn_epi32_mask(right, right) << 16;
}

// Codes shifted left, by as much as each 16-bit lane of `by` says.
template <bool bytes> inline __m512i shift_codes(__m512i codes, __m512i by) {
  if constexpr (!bytes) return _mm512_sllv_epi16(codes, by);
  const __m512i low_byte = _mm512_set1_epi16(0xff), kept = _mm512_and_si512(_mm512_sllv_epi16(low_byte, by), low_byte);
  return _mm512_and_si512(_mm512_sllv_epi16(codes, by), _mm512_or_si512(kept, _mm512_slli_epi16(kept, 8)));
}

// Lines of bytes, shifted where they are to be, as the tiles read A: the byte instruction multiplies unsigned by
// signed, so codes go in 128 too large, and -128 times the sum of B's codes over a run is where its dot product starts.
void finish_lines(const Exponents& x, uint32_t* lines) {
  const __m512i offset = _mm512_set1_epi8((char)128);
  const __m512i lane = _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                                             16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
                                                             30, 31));
  const __m128i log2_box = _mm_cvtsi32_si128(__builtin_ctz((unsigned)x.box));
  const __m512i box_of_lane = _mm512_srl_epi16(_mm512_slli_epi16(lane, 1), log2_box);
  uint16_t shifts[LINE + 32] = {};
  for (int i = 0; i < x.lines; i++, lines += LINE) {
    for (int b = 0; x.shifted && b < x.boxes; b++) shifts[b] = x.shift[b][i];
    for (int at = 0; at < x.boxes * x.box; at += 64) {
      __m512i codes = _mm512_loadu_si512(lines + at / 4);
      if (x.shifted) {
        const __m512i by = _mm512_permutexvar_epi16(box_of_lane, _mm512_loadu_si512(shifts + at / x.box));
        codes = shift_codes<true>(codes, by);
      }
      _mm512_storeu_si512(lines + at / 4, _mm512_xor_si512(codes, offset));
    }
  }
}

template <bool bytes> void shift_panel(const Exponents& x, uint32_t* panel) {
  for (int b = 0; b < x.boxes; b++) {
    __m512i by[2];
    for (int half = 0; half < 2; half++) {
      const __m512i shifts = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(x.shift[b] + 16 * half)));
      by[half] = _mm512_or_si512(shifts, _mm512_slli_epi32(shifts, 16));
    }
    for (int e = 0; e < x.box / PER_ELEMENT<bytes>; e++)
      for (int half = 0; half < 2; half++, panel += 16)
        _mm512_storeu_si512(panel, shift_codes<bytes>(_mm512_loadu_si512(panel), by[half]));
  }
}

// 128 times the sum of each column's codes before each box, and after the last: a run's dot product starts at what it
// finds at its first box less what it finds after its last.
void fill_offsets(const uint32_t* panel, int boxes, int elements, int32_t* offsets) {
  __m512i left = _mm512_setzero_si512(), right = left;
  for (; boxes >= 0; boxes--, offsets += GROUP) {
    _mm512_storeu_si512(offsets, left);
    _mm512_storeu_si512(offsets + 16, right);
    for (int e = 0; boxes > 0 && e < elements; e++, panel += GROUP) {
      left = _mm512_dpbusd_epi32(left, _mm512_set1_epi8((char)128), _mm512_loadu_si512(panel));
      right = _mm512_dpbusd_epi32(right, _mm512_set1_epi8((char)128), _mm512_loadu_si512(panel + 16));
    }
  }
}

// sum += a . b. In assembly because GCC 12 copies the accumulator before and after the intrinsics, which takes as long
// again as the products.
template <bool bytes> inline void add_dot(__m512i& sum, __m512i a, __m512i b) {
  if constexpr (bytes) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  else asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

struct Lines {
  const uint32_t* elements;  // LINE a line
  const float* scales;       // one box's, of TASK_ROWS lines; then the next box's
};

struct Panel {
  const uint32_t* elements;
  const float* scales;
  const int32_t* offsets;
};

// The steps that one integer dot product takes: of so many elements, and so many boxes, which share their exponents.
struct Run {
  int elements, boxes;
};

// A tile of C over `runs` runs, `columns` wide; `start`, where there is one, is added: C itself, or a bias row
// (start_stride 0). A run is one box of ELEMENTS elements, or, with 0, of any multiple of UNROLLED. ONE_STEP: all boxes
// of a column of B have the same step.
template <int rows, bool bytes, int ELEMENTS, bool ONE_STEP>
void tile(Lines a, Panel b, int runs, Run run, float* c, int64_t stride, int columns, const float* start,
          int64_t start_stride) {
  constexpr int together = ELEMENTS ? ELEMENTS : UNROLLED;
  const int elements = ELEMENTS ? ELEMENTS : run.elements, boxes = ELEMENTS ? 1 : run.boxes;
  const float* const first_scales = b.scales;
  for (int r = 0; r < rows; r++) {  // C comes from memory while the products are made
    __builtin_prefetch(c + r * stride, 1);
    __builtin_prefetch(c + r * stride + 16, 1);
  }
  __m512 left[rows], right[rows];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) left[r] = right[r] = _mm512_setzero_ps();
  for (; runs > 0; runs--, a.scales += boxes * TASK_ROWS, b.scales += boxes * GROUP) {
    __m512i dot_left[rows], dot_right[rows], offset_left = _mm512_setzero_si512(), offset_right = offset_left;
    if (bytes) {
      offset_left = _mm512_loadu_si512(b.offsets), offset_right = _mm512_loadu_si512(b.offsets + 16);
      b.offsets += boxes * GROUP;
      offset_left = _mm512_sub_epi32(offset_left, _mm512_loadu_si512(b.offsets));
      offset_right = _mm512_sub_epi32(offset_right, _mm512_loadu_si512(b.offsets + 16));
    }
    for (int r = 0; r < rows; r++) dot_left[r] = offset_left, dot_right[r] = offset_right;
    for (int e = 0; e < elements; e += together)
#pragma GCC unroll 8
      for (int u = 0; u < together; u++, a.elements++, b.elements += GROUP) {
        const __m512i b_left = _mm512_loadu_si512(b.elements), b_right = _mm512_loadu_si512(b.elements + 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          const __m512i a_row = _mm512_set1_epi32((int)a.elements[r * LINE]);
          add_dot<bytes>(dot_left[r], a_row, b_left);
          add_dot<bytes>(dot_right[r], a_row, b_right);
        }
      }
    const __m512 scale_left = _mm512_loadu_ps(b.scales), scale_right = _mm512_loadu_ps(b.scales + 16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m512 scale = _mm512_set1_ps(a.scales[r]);
      __m512 product_left = _mm512_cvtepi32_ps(dot_left[r]), product_right = _mm512_cvtepi32_ps(dot_right[r]);
      if (!ONE_STEP) {
        product_left = _mm512_mul_ps(product_left, scale_left);
        product_right = _mm512_mul_ps(product_right, scale_right);
      }
      left[r] = _mm512_fmadd_ps(product_left, scale, left[r]);
      right[r] = _mm512_fmadd_ps(product_right, scale, right[r]);
    }
  }
  if (ONE_STEP) {
    const __m512 scale_left = _mm512_loadu_ps(first_scales), scale_right = _mm512_loadu_ps(first_scales + 16);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      left[r] = _mm512_mul_ps(left[r], scale_left);
      right[r] = _mm512_mul_ps(right[r], scale_right);
    }
  }
  const __mmask16 left_mask = first16(columns), right_mask = first16(columns - 16);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++, c += stride) {
    if (start) {
      left[r] = _mm512_add_ps(left[r], _mm512_maskz_loadu_ps(left_mask, start + r * start_stride));
      right[r] = _mm512_add_ps(right[r], _mm512_maskz_loadu_ps(right_mask, start + r * start_stride + 16));
    }
    _mm512_mask_storeu_ps(c, left_mask, left[r]);
    _mm512_mask_storeu_ps(c + 16, right_mask, right[r]);
  }
}

typedef void (*Tile)(Lines, Panel, int, Run, float*, int64_t, int, const float*, int64_t);
template <bool bytes, int ELEMENTS, bool ONE_STEP = false>
constexpr Tile TILES[ROWS + 1] = {nullptr,
                                  tile<1, bytes, ELEMENTS, ONE_STEP>,
                                  tile<2, bytes, ELEMENTS, ONE_STEP>,
                                  tile<3, bytes, ELEMENTS, ONE_STEP>,
                                  tile<4, bytes, ELEMENTS, ONE_STEP>,
                                  tile<5, bytes, ELEMENTS, ONE_STEP>,
                                  tile<6, bytes, ELEMENTS, ONE_STEP>};
template <bool bytes> const Tile* tiles_of(Run run, bool one_step) {
  switch (run.boxes > 1 ? 0 : run.elements) {
    case 1: return TILES<bytes, 1>;
    case 2: return TILES<bytes, 2>;
    case 4: return TILES<bytes, 4>;  // the usual 16 steps as bytes
    case 8:  // and as words
      if constexpr (!bytes)
        if (one_step) return TILES<bytes, 8, true>;
      return TILES<bytes, 8>;
    default: return TILES<bytes, 0>;
  }
}

// What a GEMM keeps in scratch memory, in blocks of so many steps.
struct Scratch {
  int64_t a_groups, a_tasks, b_panels, blocks, boxes;
  Scratch(int64_t rows, int64_t columns, int64_t depth, int box, int steps)
      : a_groups(ceil_div(rows, GROUP)), a_tasks(ceil_div(rows, TASK_ROWS)), b_panels(ceil_div(columns, GROUP)),
        blocks(ceil_div(depth, steps)), boxes(steps / box) {}
  int64_t groups() const { return a_groups + b_panels; }
  int64_t elements() const { return blocks * groups() * GROUP * LINE; }
  int64_t a_scales() const { return blocks * a_tasks * boxes * TASK_ROWS; }
  int64_t b_scales() const { return blocks * b_panels * boxes * GROUP; }
  int64_t b_offsets() const { return blocks * b_panels * (boxes + 1) * GROUP; }
  int64_t bytes() const { return 4 * (elements() + a_scales() + b_scales() + b_offsets() + blocks * groups()); }
};

template <bool bytes>
void multiply(const Packed& A, const Packed& B, const float* bias, float* c, uint32_t* memory, int threads) {
  constexpr int per_element = PER_ELEMENT<bytes>, block_steps = STEPS<bytes>;
  const int64_t rows = A.lines, columns = B.lines, depth = A.depth;
  const Scratch scratch(rows, columns, depth, A.box, block_steps);
  const int64_t boxes = scratch.boxes, blocks = scratch.blocks, a_groups = scratch.a_groups, groups = scratch.groups();
  uint32_t *a_elements = memory, *b_elements = a_elements + blocks * a_groups * GROUP * LINE;
  float *a_scales = (float*)(memory + scratch.elements()), *b_scales = a_scales + scratch.a_scales();
  int32_t *b_offsets = (int32_t*)(b_scales + scratch.b_scales()), *runs = b_offsets + scratch.b_offsets();
  auto a_elements_of = [&](int64_t block, int64_t line) {
    return a_elements + (block * a_groups * GROUP + line) * LINE;
  };
  auto a_scales_of = [&](int64_t block, int64_t line) {
    return a_scales + (block * scratch.a_tasks + line / TASK_ROWS) * boxes * TASK_ROWS + line % TASK_ROWS;
  };
  auto panel_at = [&](int64_t block, int64_t panel) { return (panel * blocks + block) * GROUP; };
  const int box_elements = A.box / per_element;
  // Steps of a run, for each group of lines in each block; A's groups come first.
  auto run_of = [&](int64_t group, int64_t block) -> int32_t& { return runs[block * groups + group]; };
  // By how many bits codes may be shifted: to fill a byte or a word, and such that a box's dot product fits 32.
  auto largest = [](const Packed& x) { return (1u << (x.bits - 1)) - 1; };
  const int spare_in_sum = __builtin_clz(largest(A) * largest(B) * (unsigned)A.box) - 1;
  const int a_spare = 8 - A.bits, b_spare = bytes ? 8 - B.bits : least(16 - B.bits, spare_in_sum);
  if (rows * columns * depth < 1 << 20) threads = 1;

  // Neighbouring groups come one after another: across, their codes lie side by side.
  share_out(blocks * groups, threads, [&](int64_t task) {
    const int64_t group = task % groups, block = task / groups, k = block * block_steps;
    const int steps = least(block_steps, depth - k);
    int32_t& run = run_of(group, block) = A.box;
    if (group < a_groups) {
      const int64_t line = group * GROUP;
      Exponents exponents(A, line, k, steps);
      fill_lines<bytes>(A, line, k, steps, a_elements_of(block, line));
      if constexpr (bytes) {
        exponents.pass_over_zeros([&](int b) { return zeros_of_lines(a_elements_of(block, line), b, box_elements); });
        run = exponents.share<bytes>(a_spare);
        finish_lines(exponents, a_elements_of(block, line));
      }
      exponents.fill_scales(A.bits, a_scales_of(block, line), TASK_ROWS);
      return;
    }
    const int64_t line = (group - a_groups) * GROUP, at = panel_at(block, group - a_groups);
    uint32_t* panel = b_elements + at * LINE;
    Exponents exponents(B, line, k, steps);
    fill_panel<bytes>(B, line, k, steps, panel);
    if (bytes || B.box == ONE_STEP_BOX) {
      exponents.pass_over_zeros([&](int b) { return zeros_of_panel(panel, b, box_elements); });
      run = exponents.share<bytes>(b_spare);
    }
    if (exponents.shifted) shift_panel<bytes>(exponents, panel);
    exponents.fill_scales(B.bits, b_scales + at * boxes, GROUP);
    if (bytes) fill_offsets(panel, B.steps_read(steps) / B.box, box_elements, b_offsets + at * (boxes + 1));
  });

  share_out(scratch.b_panels * scratch.a_tasks, threads, [&](int64_t task) {
    const int64_t j = task % scratch.b_panels, top = task / scratch.b_panels * TASK_ROWS;
    const int64_t bottom = top + TASK_ROWS < rows ? top + TASK_ROWS : rows;
    const int width = least(GROUP, columns - j * GROUP);
    for (int64_t block = 0; block < blocks; block++) {
      const int steps = least(block_steps, depth - block * block_steps);
      const int b_run = run_of(a_groups + j, block);
      int run = b_run;
      for (int64_t group = top / GROUP; group * GROUP < bottom; group++) run = least(run, run_of(group, block));
      const int run_steps = least(run, A.steps_read(steps));
      const Run each{run_steps / per_element, run_steps / A.box};
      const Tile* tiles = tiles_of<bytes>(each, b_run == block_steps);
      const int64_t at = panel_at(block, j);
      const Panel b{b_elements + at * LINE, b_scales + at * boxes, b_offsets + at * (boxes + 1)};
      for (int64_t row = top; row < bottom; row += ROWS) {
        const Lines a{a_elements_of(block, row), a_scales_of(block, row)};
        float* corner = c + row * columns + j * GROUP;
        const float* start = block ? corner : bias ? bias + j * GROUP : nullptr;
        tiles[least(ROWS, bottom - row)](a, b, (int)ceil_div(steps, run), each, corner, columns, width, start,
                                         block ? columns : 0);
      }
    }
  });
}

}  // namespace

EXPORT int dsq_has_gemm_boxes() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// Bytes of scratch memory that a product (rows x depth) (depth x columns) with boxes of `box` needs.
EXPORT int64_t dsq_gemm_boxes_scratch(int64_t rows, int64_t columns, int64_t depth, int box) {
  const int64_t bytes = Scratch(rows, columns, depth, box, STEPS<true>).bytes();
  const int64_t words = Scratch(rows, columns, depth, box, STEPS<false>).bytes();
  return bytes > words ? bytes : words;
}

// c (rows x columns, contiguous) = a (rows x depth) b (depth x columns) + bias (columns, or null), from packed a and b
// with boxes of `box` along the depth, or with one exponent. `across`: a row of its codes holds one step of the depth.
// `box` is even and divides 256; a dot product over it must fit 32 bits.
EXPORT void dsq_gemm_boxes(const uint8_t* a_codes, const uint8_t* a_exponents, int a_bits, int a_across,
                           const uint8_t* b_codes, const uint8_t* b_exponents, int b_bits, int b_across,
                           int one_exponent, int box, const float* bias, float* c, int64_t rows, int64_t columns,
                           int64_t depth, uint32_t* scratch, int threads) {
  const Packed A{a_codes, a_exponents, a_bits, box, one_exponent != 0, a_across != 0, rows, depth};
  const Packed B{b_codes, b_exponents, b_bits, box, one_exponent != 0, b_across != 0, columns, depth};
  const bool bytes = a_bits <= 8 && b_bits <= 8 && box % 4 == 0;
  (bytes ? multiply<true> : multiply<false>)(A, B, bias, c, scratch, threads);
}
