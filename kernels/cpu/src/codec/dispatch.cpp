// Picks the instruction set's kernels and deals their tasks to threads.
#include "codec.h"

#include "../threads.h"

namespace {

const IsaKernels* const ISAS[] = {
#ifdef DSQ_X86
    &AVX512, &AVX2,
#endif
    &PORTABLE,
};
constexpr int ISA_COUNT = sizeof ISAS / sizeof *ISAS;

// Below this many values a thread costs more than it saves.
constexpr int64_t VALUES_PER_THREAD = 1 << 15;

typedef void (*Range)(const CodecJob&, int64_t begin, int64_t end, std::atomic<uint32_t>& most);

uint32_t deal_out(const CodecJob& job, Range range, int64_t count, int threads) {
  if (count == 0) return 0;
  const CodecDesc& p = *job.desc;
  int64_t useful = p.outer * p.rows * p.columns / VALUES_PER_THREAD;
  if (useful > count) useful = count;
  if (threads > useful) threads = (int)useful;
  const int64_t pieces = !openmp_parallel || threads < 2 ? 1 : 8 * threads < count ? 8 * threads : count;
  std::atomic<uint32_t> most{0};
  parallel_for(pieces, threads, [&](int64_t i) { range(job, count * i / pieces, count * (i + 1) / pieces, most); });
  return most;
}

void atomic_max(uint32_t found, std::atomic<uint32_t>& most) {
  for (uint32_t before = most; before < found && !most.compare_exchange_weak(before, found);) {
  }
}

void range_largest(const CodecJob& job, int64_t begin, int64_t end, std::atomic<uint32_t>& most) {
  constexpr int64_t piece = 4096;
  const CodecDesc& p = *job.desc;
  int64_t values = p.outer * p.rows * p.columns;
  atomic_max(ISAS[p.isa]->largest(job, begin * piece, end * piece < values ? end * piece : values), most);
}

// Quantises or packs, also finding the largest value if a static binary point is in force: a few tasks at a time, whose
// values are still in a near cache when they are read again.
template <auto kernel> void range_encode(const CodecJob& job, int64_t begin, int64_t end, std::atomic<uint32_t>& most) {
  const CodecDesc& p = *job.desc;
  const IsaKernels& isa = *ISAS[p.isa];
  if (p.box || job.tensor_exponent != p.static_scale) return (isa.*kernel)(job, begin, end);
  constexpr int64_t few = 256;
  const Tasks tasks = encode_tasks(p);
  auto first_value = [&](int64_t task) { return task / tasks.strips * p.columns + task % tasks.strips * tasks.width; };
  for (; begin < end; begin += few) {
    const int64_t stop = begin + few < end ? begin + few : end;
    atomic_max(isa.largest(job, first_value(begin), first_value(stop)), most);
    (isa.*kernel)(job, begin, stop);
  }
}

void range_unpack(const CodecJob& job, int64_t begin, int64_t end, std::atomic<uint32_t>&) {
  ISAS[job.desc->isa]->unpack(job, begin, end);
}

// The tensor's exponent as SIGNED_E4M3 stores it, whose steps and their inverses are to be normal numbers.
int32_t clipped(int32_t exponent) {
  constexpr int32_t lowest = 127 - 90, highest = 127 + 120;
  return exponent == NAN_EXPONENT ? exponent : exponent < lowest ? lowest : exponent > highest ? highest : exponent;
}

// Where the tensor's own exponent lies among its scales, or null.
uint8_t* tensor_scale(const CodecDesc& p, const uint8_t* scales) {
  if (p.box == 0) return (uint8_t*)scales;
  if (p.scales != SIGNED_E4M3) return nullptr;
  const int64_t boxes = p.outer * ceil_div(p.along_rows ? p.rows : p.columns, p.box);
  return (uint8_t*)scales + boxes * (p.along_rows ? p.columns : p.rows);
}

// Whether E4M3 holds the scales of these boxes as normal numbers, the tensor's exponent being this or any below, down to
// its own. Then the steps do not depend on which it is.
bool holds_scales(int32_t exponent, const Magnitudes& found) {
  return (int32_t)(found.most >> 23) <= exponent && (int32_t)(found.least >> 23) >= exponent - 13;
}

template <auto kernel> void range_guessed(const CodecJob& job, int64_t begin, int64_t end, std::atomic<uint32_t>&) {
  constexpr int64_t few = 256;
  for (; begin < end && holds_scales(job.tensor_exponent, *job.found); begin += few)
    (ISAS[job.desc->isa]->*kernel)(job, begin, begin + few < end ? begin + few : end);
}

// Quantises or packs SIGNED_E4M3 in one pass, with an exponent of the tensor that is guessed, somewhat high, from a few
// of its values; then corrects the scales. Returns false where another pass has to do it all again: where the guess was
// too low, or scales so far below that their steps depend on it.
template <auto kernel> bool encode_by_guess(CodecJob& job, int64_t tasks, int threads) {
  constexpr int64_t fewest = 1 << 14, places = 16, some = 256;
  constexpr int32_t slack = 3;
  const CodecDesc& p = *job.desc;
  const int64_t values = p.outer * p.rows * p.columns;
  if (values < fewest || job.values == job.out) return false;
  uint32_t most = 0;
  for (int64_t i = 0; i < places; i++) {
    const int64_t at = values / places * i;
    const uint32_t here = ISAS[p.isa]->largest(job, at, at + some);
    most = here > most ? here : most;
  }
  const int32_t guess = (int32_t)(most >> 23) + slack;
  if (most == 0 || clipped(guess) != guess) return false;
  Magnitudes found;
  job.found = &found, job.tensor_exponent = guess;
  deal_out(job, range_guessed<kernel>, tasks, threads);
  job.found = nullptr, job.tensor_exponent = (int32_t)(found.most >> 23);
  if (!holds_scales(guess, found) || clipped(job.tensor_exponent) != job.tensor_exponent) return false;
  if (!job.exponents) return true;
  const int rise = (guess - job.tensor_exponent) << 3;
  uint8_t* const end = tensor_scale(p, job.exponents);
  for (uint8_t* scale = job.exponents; scale < end; scale++) *scale = (uint8_t)(*scale & 127 ? *scale + rise : *scale);
  return true;
}

// Quantises or packs. Where one box holds the whole tensor, or an exponent of the tensor all boxes' scales, it comes
// first, from a pass of its own; a static one is known, unless a NaN turns up among the values: then all becomes NaN.
template <auto kernel> void encode(CodecJob& job, int threads) {
  const CodecDesc& p = *job.desc;
  const int64_t tasks = encode_tasks(p).count();
  const bool of_e4m3 = p.scales == SIGNED_E4M3;
  if (of_e4m3 && encode_by_guess<kernel>(job, tasks, threads)) return;
  if (p.box == 0 && p.static_scale >= 0)
    job.tensor_exponent = p.static_scale;
  else if (p.box == 0 || of_e4m3)
    job.tensor_exponent =
        (int)(deal_out(job, range_largest, ceil_div(p.outer * p.rows * p.columns, 4096), threads) >> 23);
  if (of_e4m3) job.tensor_exponent = clipped(job.tensor_exponent);
  const uint32_t found = deal_out(job, range_encode<kernel>, tasks, threads) >> 23;
  if (found != NAN_EXPONENT) return;
  job.tensor_exponent = NAN_EXPONENT;
  deal_out(job, range_encode<kernel>, tasks, threads);
}

// Where rows hold whole boxes and whole bytes of codes, the tensor can be treated as one long row, unless rounding
// draws numbers row by row.
CodecDesc as_one_row(const CodecDesc& p) {
  CodecDesc row = p;
  const bool whole = p.columns * p.bits % 8 == 0 && (p.box == 0 || (!p.along_rows && p.columns % p.box == 0));
  if (!whole || p.stochastic) return row;
  row.columns *= p.outer * p.rows;
  row.row_bytes *= p.outer * p.rows;
  row.outer = row.rows = 1;
  return row;
}

// Whether the values are too large for any cache.
bool beyond_caches(const CodecDesc& p, int32_t dtype) {
  constexpr int64_t large = 8 << 20;
  return p.outer * p.rows * p.columns * (dtype == FLOAT32 ? 4 : 2) >= large;
}

// Whether prefetched cache lines are written faster than streaming stores: 10 against 7 GB/s by one core of Cascade
// Lake, 18 against 13 by two. Many cores saturate the memory, and prefetching costs it one more read.
bool few_cores_of_intel(int threads) {
#ifdef DSQ_X86
  return threads <= 4 && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// How values are written: to prefetched cache lines, or with streaming stores where rows keep the alignment.
void choose_writing(CodecJob& job, int32_t dtype, int threads) {
  const CodecDesc& p = *job.desc;
  const bool large = beyond_caches(p, dtype), few = few_cores_of_intel(threads);
  const int64_t row = p.columns * (dtype == FLOAT32 ? 4 : 2);
  job.past_caches = large && !few && (uintptr_t)job.out % 64 == 0 && row % 64 == 0;
  job.prefetch = few && (large || !job.values);
}

}  // namespace

const IsaKernels* isa_kernels(int index) { return index < ISA_COUNT ? ISAS[index] : nullptr; }

void quantize_tensor(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed) {
  const CodecDesc p = as_one_row(desc);
  CodecJob job{&p, x, out, nullptr, nullptr, seed, 0, false, false, beyond_caches(p, p.dtype), nullptr};
  choose_writing(job, p.out_dtype, threads);
  encode<&IsaKernels::quantize>(job, threads);
}

void pack_tensor(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed) {
  const CodecDesc p = as_one_row(desc);
  CodecJob job{&p, x, nullptr, codes, p.box ? exponents : nullptr, seed, 0, false, false, beyond_caches(p, p.dtype), nullptr};
  encode<&IsaKernels::pack>(job, threads);
  if (uint8_t* const own = tensor_scale(p, exponents)) *own = (uint8_t)job.tensor_exponent;
}

void unpack_tensor(const CodecDesc& desc, const uint8_t* codes, const uint8_t* exponents, void* out, int threads) {
  const CodecDesc p = as_one_row(desc);
  CodecJob job{&p, nullptr, out, (uint8_t*)codes, (uint8_t*)exponents, 0, 0, false, false, false, nullptr};
  choose_writing(job, p.dtype, threads);
  if (const uint8_t* const own = tensor_scale(p, exponents)) job.tensor_exponent = *own;
  deal_out(job, range_unpack, decode_tasks(p), threads);
}

void run_mask(int isa, void (*IsaKernels::*kernel)(const MaskJob&, int64_t, int64_t), const MaskJob& job, int64_t count,
              int threads) {
  constexpr int64_t piece = VALUES_PER_THREAD;
  static_assert(piece % 32 == 0, "a piece begins with a word of bits");
  const auto run = ISAS[isa]->*kernel;
  parallel_for(ceil_div(count, piece), threads, [&](int64_t i) {
    const int64_t begin = i * piece, end = begin + piece;
    run(job, begin, end < count ? end : count);
  });
}
