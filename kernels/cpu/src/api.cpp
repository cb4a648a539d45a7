// What native.py and layer.cpp call: picks the instruction set's kernels and deals their tasks to threads.
#include <atomic>
#include <initializer_list>

#include "entries.h"

Parallel parallel = nullptr;
ThreadNumber thread_number = nullptr;

namespace {

const Isa* const ISAS[] = {
#ifdef DSQ_X86
    &AVX512, &AVX2,
#endif
    &PORTABLE,
};
constexpr int ISA_COUNT = sizeof ISAS / sizeof *ISAS;

// Below this many values a thread costs more than it saves.
constexpr int64_t VALUES_A_THREAD = 1 << 15;

typedef void (*Range)(const Job&, int64_t begin, int64_t end, std::atomic<uint32_t>& most);

uint32_t deal_out(const Job& job, Range range, int64_t count, int threads) {
  if (count == 0) return 0;
  const Plan& p = *job.plan;
  int64_t useful = p.outer * p.rows * p.columns / VALUES_A_THREAD;
  if (useful > count) useful = count;
  if (threads > useful) threads = (int)useful;
  const int64_t pieces = !parallel || threads < 2 ? 1 : 8 * threads < count ? 8 * threads : count;
  std::atomic<uint32_t> most{0};
  share_out(pieces, threads, [&](int64_t i) { range(job, count * i / pieces, count * (i + 1) / pieces, most); });
  return most;
}

void raise_to(uint32_t found, std::atomic<uint32_t>& most) {
  for (uint32_t before = most; before < found && !most.compare_exchange_weak(before, found);) {
  }
}

void range_largest(const Job& job, int64_t begin, int64_t end, std::atomic<uint32_t>& most) {
  constexpr int64_t piece = 4096;
  const Plan& p = *job.plan;
  int64_t values = p.outer * p.rows * p.columns;
  raise_to(ISAS[p.isa]->largest(job, begin * piece, end * piece < values ? end * piece : values), most);
}

// Quantises or packs, also finding the largest value if a static binary point is in force: a few tasks at a time, whose
// values are still in a near cache when they are read again.
template <auto kernel> void range_encode(const Job& job, int64_t begin, int64_t end, std::atomic<uint32_t>& most) {
  const Plan& p = *job.plan;
  const Isa& isa = *ISAS[p.isa];
  if (p.box || job.tensor_exponent != p.exponent) return (isa.*kernel)(job, begin, end);
  constexpr int64_t few = 256;
  const Tasks tasks = encode_tasks(p);
  auto first_value = [&](int64_t task) { return task / tasks.strips * p.columns + task % tasks.strips * tasks.width; };
  for (; begin < end; begin += few) {
    const int64_t stop = begin + few < end ? begin + few : end;
    raise_to(isa.largest(job, first_value(begin), first_value(stop)), most);
    (isa.*kernel)(job, begin, stop);
  }
}

void range_unpack(const Job& job, int64_t begin, int64_t end, std::atomic<uint32_t>&) {
  ISAS[job.plan->isa]->unpack(job, begin, end);
}

// Quantises or packs. Where one box holds the whole tensor, its exponent comes first, from a pass of its own; a static
// one is known, unless on the way a NaN is found: then all becomes NaN.
template <auto kernel> void encode(Job& job, int threads) {
  const Plan& p = *job.plan;
  const int64_t tasks = encode_tasks(p).count();
  if (p.box == 0 && p.exponent >= 0)
    job.tensor_exponent = p.exponent;
  else if (p.box == 0)
    job.tensor_exponent =
        (int)(deal_out(job, range_largest, ceil_div(p.outer * p.rows * p.columns, 4096), threads) >> 23);
  const uint32_t found = deal_out(job, range_encode<kernel>, tasks, threads) >> 23;
  if (found != NAN_EXPONENT) return;
  job.tensor_exponent = NAN_EXPONENT;
  deal_out(job, range_encode<kernel>, tasks, threads);
}

// Where rows hold whole boxes and whole bytes of codes, a tensor is as good as one long row, unless rounding draws
// numbers row by row.
Plan in_one_row(const Plan& p) {
  Plan plan = p;
  const bool whole = p.columns * p.bits % 8 == 0 && (p.box == 0 || (!p.along_rows && p.columns % p.box == 0));
  if (!whole || p.stochastic) return plan;
  plan.columns *= p.outer * p.rows;
  plan.row_bytes *= p.outer * p.rows;
  plan.outer = plan.rows = 1;
  return plan;
}

// Whether no cache will hold the values.
bool beyond_caches(const Plan& p, int32_t dtype) {
  constexpr int64_t large = 8 << 20;
  return p.outer * p.rows * p.columns * (dtype == FLOAT32 ? 4 : 2) >= large;
}

// Whether lines asked for ahead are written faster than what goes past the caches: 10 against 7 GB/s by one core of
// Cascade Lake, 18 against 13 by two. Many cores fill the memory's bandwidth, of which asking takes a read more.
bool few_cores_of_intel(int threads) {
#ifdef DSQ_X86
  return threads <= 4 && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// How values are written: asked for ahead, or, where rows keep the alignment, past the caches that will not hold them.
void choose_writing(Job& job, int32_t dtype, int threads) {
  const Plan& p = *job.plan;
  const bool large = beyond_caches(p, dtype), few = few_cores_of_intel(threads);
  const int64_t row = p.columns * (dtype == FLOAT32 ? 4 : 2);
  job.stream = large && !few && (uintptr_t)job.out % 64 == 0 && row % 64 == 0;
  job.ask = few && (large || !job.values);
}

}  // namespace

// The name of instruction set `index`, best first, or null past the last; `usable` says whether this machine has it.
EXPORT const char* dsq_isa(int index, int* usable) {
  if (index >= ISA_COUNT) return nullptr;
  *usable = ISAS[index]->usable();
  return ISAS[index]->name;
}

// GOMP_parallel and omp_get_thread_num of the OpenMP runtime in this process.
EXPORT void dsq_use_threads(void* run, void* number) { parallel = (Parallel)run, thread_number = (ThreadNumber)number; }

EXPORT void dsq_quantize(const Plan* plan, const void* x, void* out, int threads, uint64_t seed) {
  const Plan made = in_one_row(*plan), *const p = &made;
  Job job{p, x, out, nullptr, nullptr, seed, 0, false, false, beyond_caches(*p, p->dtype)};
  choose_writing(job, p->out_dtype, threads);
  encode<&Isa::quantize>(job, threads);
}

EXPORT void dsq_pack(const Plan* plan, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed) {
  const Plan made = in_one_row(*plan), *const p = &made;
  Job job{p, x, nullptr, codes, p->box ? exponents : nullptr, seed, 0, false, false, beyond_caches(*p, p->dtype)};
  encode<&Isa::pack>(job, threads);
  if (p->box == 0) *exponents = (uint8_t)job.tensor_exponent;
}

EXPORT void dsq_unpack(const Plan* plan, const uint8_t* codes, const uint8_t* exponents, void* out, int threads) {
  const Plan made = in_one_row(*plan), *const p = &made;
  Job job{p, nullptr, out, (uint8_t*)codes, (uint8_t*)exponents, 0, 0, false, false, false};
  choose_writing(job, p->dtype, threads);
  if (p->box == 0) job.tensor_exponent = *exponents;
  deal_out(job, range_unpack, decode_tasks(*p), threads);
}

// Values that a thread takes at a time where each becomes a bit.
constexpr int64_t MASK_PIECE = VALUES_A_THREAD;
static_assert(MASK_PIECE % 32 == 0, "a piece begins with a word of bits");

static void on_pieces(const MaskJob& job, void (*kernel)(const MaskJob&, int64_t, int64_t), int64_t count,
                      int threads) {
  share_out(ceil_div(count, MASK_PIECE), threads, [&](int64_t i) {
    const int64_t begin = i * MASK_PIECE, end = begin + MASK_PIECE;
    kernel(job, begin, end < count ? end : count);
  });
}

EXPORT void dsq_pack_mask(int isa, const void* values, int dtype, int64_t count, float low, float high, int nan_is_open,
                          uint8_t* bits, int threads) {
  const MaskJob job{(void*)values, bits, dtype, low, high, nan_is_open != 0, 0, 0, nullptr};
  on_pieces(job, ISAS[isa]->mask, count, threads);
}

EXPORT void dsq_unpack_mask(int isa, const uint8_t* bits, int64_t count, int dtype, float closed, float open,
                            void* values, int threads) {
  const MaskJob job{values, (uint8_t*)bits, dtype, 0, 0, false, closed, open, nullptr};
  on_pieces(job, ISAS[isa]->unmask, count, threads);
}

EXPORT void dsq_apply_mask(int isa, const uint8_t* bits, int64_t count, int dtype, const void* x, void* out,
                           int threads) {
  const MaskJob job{out, (uint8_t*)bits, dtype, 0, 0, false, 0, 0, x};
  on_pieces(job, ISAS[isa]->apply_mask, count, threads);
}

EXPORT void dsq_relu(int isa, const float* x, int64_t count, float* y, uint8_t* bits, int threads) {
  const MaskJob job{y, bits, FLOAT32, 0, 0, false, 0, 0, x};
  on_pieces(job, ISAS[isa]->relu, count, threads);
}
