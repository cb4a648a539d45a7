// Quantizing, packing and unpacking a tensor: its own exponent, where it has one, and tasks dealt out to threads.
#include "codec.h"

#include <string.h>

#include "../threads.h"

namespace {

// Values of a task that looks for the largest magnitude.
constexpr int64_t LARGEST_PIECE = 4096;

int64_t values_of(const CodecDesc& p) { return p.outer * p.rows * p.columns; }

// The pieces to deal `count` tasks out in; fewer threads where there is less to do.
int64_t pieces_for(const CodecDesc& p, int64_t count, int& threads) {
  int64_t useful = values_of(p) / VALUES_PER_THREAD;
  if (useful > count) useful = count;
  if (threads > useful) threads = (int)useful;
  return !openmp_parallel || threads < 2 ? 1 : 8 * threads < count ? 8 * threads : count;
}

// Calls work(begin, end) on pieces of `count` tasks.
template <class Work> void deal_out(const CodecDesc& p, int64_t count, int threads, const Work& work) {
  if (count == 0) return;
  const int64_t pieces = pieces_for(p, count, threads);
  parallel_for(pieces, threads, [&](int64_t i) { work(count * i / pieces, count * (i + 1) / pieces); });
}

void atomic_max(uint32_t found, std::atomic<uint32_t>& most) {
  for (uint32_t before = most; before < found && !most.compare_exchange_weak(before, found);) {
  }
}

// The bits of the tensor's largest magnitude, from a pass of its own.
uint32_t largest_magnitude(const CodecJob& job, int threads) {
  const CodecDesc& p = *job.desc;
  const auto largest = isa_kernels(p.isa)->largest;
  const int64_t values = values_of(p);
  std::atomic<uint32_t> most{0};
  deal_out(p, ceil_div(values, LARGEST_PIECE), threads, [&](int64_t begin, int64_t end) {
    const int64_t last = end * LARGEST_PIECE;
    atomic_max(largest(job, begin * LARGEST_PIECE, last < values ? last : values), most);
  });
  return most;
}
int32_t largest_exponent(const CodecJob& job, int threads) { return (int32_t)(largest_magnitude(job, threads) >> 23); }

// Where the tensor's own exponent lies among its scales, or null.
uint8_t* tensor_scale(const CodecDesc& p, const uint8_t* scales) {
  if (p.block_size == 0) return (uint8_t*)scales;
  if (p.scales != SIGNED_E4M3) return nullptr;
  const int64_t blocks = p.outer * ceil_div(p.along_rows ? p.rows : p.columns, p.block_size);
  return (uint8_t*)scales + blocks * (p.along_rows ? p.columns : p.rows);
}

// Whether E4M3 holds the scales of these blocks as normal numbers, the tensor's exponent being this or any below, down to
// its own. Then the steps do not depend on which it is.
bool holds_scales(int32_t exponent, const Magnitudes& found) {
  return (int32_t)(found.most >> 23) <= exponent && (int32_t)(found.least >> 23) >= exponent - 13;
}

// Where rows hold whole blocks and whole bytes of codes, the tensor can be treated as one long row, unless rounding
// draws numbers row by row.
CodecDesc as_one_row(const CodecDesc& p) {
  CodecDesc row = p;
  const bool whole = p.columns * p.bits % 8 == 0 && (p.block_size == 0 || (!p.along_rows && p.columns % p.block_size == 0));
  if (!whole || p.stochastic) return row;
  row.columns *= p.outer * p.rows;
  row.row_bytes *= p.outer * p.rows;
  row.outer = row.rows = 1;
  return row;
}

// Whether the values are too large for any cache.
bool beyond_caches(const CodecDesc& p, int32_t dtype) {
  constexpr int64_t large = 8 << 20;
  return values_of(p) * (dtype == FLOAT32 ? 4 : 2) >= large;
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

Encoding::Encoding(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed)
    : p_(as_one_row(desc)), kernel_(&IsaKernels::quantize), job_{&p_, x} {
  job_.out = out;
  choose_writing(job_, p_.out_dtype, threads);
  start(threads, seed);
}

Encoding::Encoding(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* scales, int threads, uint64_t seed)
    : p_(as_one_row(desc)), kernel_(&IsaKernels::pack), scales_(scales), job_{&p_, x} {
  job_.codes = codes;
  if (p_.block_size) job_.exponents = scales;
  start(threads, seed);
}

void Encoding::start(int threads, uint64_t seed) {
  job_.seed = seed;
  job_.from_memory = beyond_caches(p_, p_.dtype);
  find_exponent(threads);
}

// Finds the exponent of the whole tensor, which comes before the scales. It takes a pass over the values. For SIGNED_E4M3
// it is guessed from a few values, somewhat too high; a static exponent needs no pass.
void Encoding::find_exponent(int threads) {
  constexpr int64_t fewest = 1 << 14, places = 16, some = 256;
  constexpr int32_t slack = 3;
  const int64_t values = values_of(p_);
  const bool of_e4m3 = p_.scales == SIGNED_E4M3;
  if (of_e4m3 && values >= fewest && job_.values != job_.out) {
    uint32_t most = 0;
    for (int64_t i = 0; i < places; i++) {
      const int64_t at = values / places * i;
      const uint32_t here = isa_kernels(p_.isa)->largest(job_, at, at + some);
      most = here > most ? here : most;
    }
    job_.tensor_exponent = (int32_t)(most >> 23) + slack;
    if (most != 0 && clipped(job_.tensor_exponent) == job_.tensor_exponent) {
      job_.found = &found_;
      return;
    }
  }
  if (p_.block_size == 0 && p_.static_scale >= 0)
    job_.tensor_exponent = p_.static_scale;
  else if (p_.block_size == 0 || of_e4m3)
    job_.tensor_exponent = largest_exponent(job_, threads);
  if (of_e4m3) job_.tensor_exponent = clipped(job_.tensor_exponent);
}

void Encoding::run_piece(int64_t piece, int64_t pieces) {
  // A few tasks at a time: where the largest value is looked for too, to be read again from a near cache, and where the
  // exponent is a guess, to end soon if it was too low.
  constexpr int64_t few = 256;
  const Tasks tasks = encode_tasks(p_);
  const IsaKernels& isa = *isa_kernels(p_.isa);
  int64_t begin = tasks.count() * piece / pieces;
  const int64_t end = tasks.count() * (piece + 1) / pieces;
  const bool is_static = !p_.block_size && job_.tensor_exponent == p_.static_scale;
  if (begin < end && !is_static && !job_.found) return (isa.*kernel_)(job_, begin, end);
  auto first_value = [&](int64_t task) { return task / tasks.strips * p_.columns + task % tasks.strips * tasks.width; };
  for (; begin < end && !(job_.found && !holds_scales(job_.tensor_exponent, found_)); begin += few) {
    const int64_t stop = begin + few < end ? begin + few : end;
    if (is_static) atomic_max(isa.largest(job_, first_value(begin), first_value(stop)), largest_);
    (isa.*kernel_)(job_, begin, stop);
  }
}

// Another pass has to do it all again where the guess was too low, or scales so far below that their steps depend on it;
// and where a NaN turned up under a static exponent: then all becomes NaN.
void Encoding::finish(int threads) {
  if (job_.found) {
    const int32_t guess = job_.tensor_exponent;
    job_.found = nullptr, job_.tensor_exponent = (int32_t)(found_.most >> 23);
    if (!holds_scales(guess, found_) || clipped(job_.tensor_exponent) != job_.tensor_exponent) {
      job_.tensor_exponent = clipped(largest_exponent(job_, threads));
      run_alone(threads);
    } else if (job_.exponents) {
      const int rise = (guess - job_.tensor_exponent) << 3;
      uint8_t* const end = tensor_scale(p_, job_.exponents);
      for (uint8_t* scale = job_.exponents; scale < end; scale++)
        *scale = (uint8_t)(*scale & 127 ? *scale + rise : *scale);
    }
  } else if (largest_ >> 23 == NAN_EXPONENT) {
    job_.tensor_exponent = NAN_EXPONENT;
    run_alone(threads);
  }
  if (!scales_) return;
  if (uint8_t* const own = tensor_scale(p_, scales_)) *own = (uint8_t)job_.tensor_exponent;
}

void Encoding::run_alone(int threads) {
  const int64_t pieces = pieces_for(p_, encode_tasks(p_).count(), threads);
  parallel_for(pieces, threads, [&](int64_t i) { run_piece(i, pieces); });
}

void Encoding::run(int threads) {
  run_alone(threads);
  finish(threads);
}

void encode_both(Encoding& one, Encoding& other, int threads) {
  const int64_t pieces = ceil_div(values_of(one.p_), VALUES_PER_THREAD);
  parallel_for(pieces, threads, [&](int64_t i) { one.run_piece(i, pieces), other.run_piece(i, pieces); });
  one.finish(threads), other.finish(threads);
}

void quantize_tensor(const CodecDesc& desc, const void* x, void* out, int threads, uint64_t seed) {
  Encoding(desc, x, out, threads, seed).run(threads);
}

void pack_tensor(const CodecDesc& desc, const void* x, uint8_t* codes, uint8_t* exponents, int threads, uint64_t seed) {
  Encoding(desc, x, codes, exponents, threads, seed).run(threads);
}

void unpack_tensor(const CodecDesc& desc, const uint8_t* codes, const uint8_t* exponents, void* out, int threads) {
  const CodecDesc p = as_one_row(desc);
  CodecJob job{&p};
  job.out = out, job.codes = (uint8_t*)codes, job.exponents = (uint8_t*)exponents;
  choose_writing(job, p.dtype, threads);
  if (const uint8_t* const own = tensor_scale(p, exponents)) job.tensor_exponent = p.scales == SIGNED_E4M3 ? clipped(*own) : *own;
  const auto unpack = isa_kernels(p.isa)->unpack;
  deal_out(p, decode_tasks(p), threads, [&](int64_t begin, int64_t end) { unpack(job, begin, end); });
}

namespace {

// As as_one_row.
GridDesc as_one_row(const GridDesc& g) {
  GridDesc one = g;
  const bool along_columns = !g.codec.along_rows && g.block_rows == 1 && g.block_columns % 16 == 0;
  if (!g.one_block && !along_columns) return one;
  one.codec.along_rows = 0, one.codec.block_size = g.one_block ? 0 : (int32_t)g.block_columns;
  one.codec = as_one_row(one.codec);
  return one;
}

bool scales_tensor(const GridDesc& g) { return g.rule == E4M3_TE || g.rule == E4M3_CLAMPED; }

int64_t blocks_of(const GridDesc& g) {
  const CodecDesc& p = g.codec;
  if (g.one_block) return values_of(p) != 0;
  return p.outer * ceil_div(p.rows, g.block_rows) * ceil_div(p.columns, g.block_columns);
}

void encode_grid(GridJob& job, void (*IsaKernels::*kernel)(const GridJob&, int64_t, int64_t), int threads) {
  const GridDesc& g = *job.grid;
  const IsaKernels& isa = *isa_kernels(g.codec.isa);
  if (g.one_block || scales_tensor(g)) job.largest = largest_magnitude(job, threads);
  deal_out(g.codec, grid_tasks(g).count, threads, [&](int64_t begin, int64_t end) { (isa.*kernel)(job, begin, end); });
}

}  // namespace

void quantize_grid_tensor(const GridDesc& desc, const void* x, void* out, int threads, uint64_t seed) {
  const GridDesc g = as_one_row(desc);
  GridJob job(g);
  job.values = x, job.out = out, job.seed = seed;
  choose_writing(job, g.codec.out_dtype, threads);
  encode_grid(job, &IsaKernels::quantize_grid, threads);
}

void pack_grid_tensor(const GridDesc& desc, const void* x, uint8_t* codes, uint8_t* scales, int threads, uint64_t seed) {
  const GridDesc g = as_one_row(desc);
  GridJob job(g);
  job.values = x, job.codes = codes, job.exponents = scales, job.pairs = scales + blocks_of(g), job.seed = seed;
  const float of_no_tensor = 1;
  if (scales_tensor(g) && values_of(g.codec) == 0) memcpy(job.pairs, &of_no_tensor, sizeof of_no_tensor);
  encode_grid(job, &IsaKernels::pack_grid, threads);
}

void unpack_grid_tensor(const GridDesc& desc, const uint8_t* codes, const uint8_t* scales, void* out, int threads) {
  const GridDesc g = as_one_row(desc);
  GridJob job(g);
  job.out = out, job.codes = (uint8_t*)codes, job.exponents = (uint8_t*)scales, job.pairs = job.exponents + blocks_of(g);
  choose_writing(job, g.codec.dtype, threads);
  const auto unpack = isa_kernels(g.codec.isa)->unpack_grid;
  deal_out(g.codec, grid_tasks(g).count, threads, [&](int64_t begin, int64_t end) { unpack(job, begin, end); });
}
