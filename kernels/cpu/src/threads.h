// The threads of PyTorch's OpenMP runtime, so that the process has one pool.
#pragma once

#include <stdint.h>

#include <atomic>

#ifdef DSQ_X86
#include <xmmintrin.h>
#endif

// GOMP_parallel and omp_get_thread_num, or null: one thread.
typedef void (*OpenMpParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*OpenMpThreadNumber)();
extern OpenMpParallel openmp_parallel;
extern OpenMpThreadNumber openmp_thread_number;
void use_threads(OpenMpParallel parallel, OpenMpThreadNumber thread_number);

namespace {

// Below this many values of a tensor a thread costs more than it saves.
constexpr int64_t VALUES_PER_THREAD = 1 << 15;

// Rounding to nearest and subnormals as IEEE 754 has them, whatever the calling thread has set.
class StandardArithmetic {
#ifdef DSQ_X86
 public:
  StandardArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined __aarch64__
 public:
  StandardArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, xzr" : : : "memory");
  }
  ~StandardArithmetic() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

 private:
  uint64_t before_;
#endif
};

// Calls body(i) for each i in 0..count-1, on up to `threads` threads. Each thread begins with the consecutive i that
// PyTorch's own loops would give it, as their memory may be in its cache, and then takes the i that other threads have
// not begun.
template <class Body> void parallel_for(int64_t count, int threads, const Body& body) {
  constexpr int max_threads = 256;
  if (threads > max_threads) threads = max_threads;
  if (threads > count) threads = (int)count;
  if (!openmp_parallel || threads < 2) {
    [[maybe_unused]] StandardArithmetic standard;
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Share shares[max_threads];
  struct Shared {
    const Body& body;
    int threads;
    Share* shares;
  } shared{body, threads, shares};
  const int64_t share = (count + threads - 1) / threads;
  for (int t = 0; t < threads; t++) {
    shares[t].next = t * share < count ? t * share : count;
    shares[t].end = (t + 1) * share < count ? (t + 1) * share : count;
  }
  auto take = [](void* data) {
    Shared& s = *(Shared*)data;
    [[maybe_unused]] StandardArithmetic standard;
    const int first = openmp_thread_number();
    for (int t = first; t < first + s.threads; t++) {
      Share& share = s.shares[t % s.threads];
      for (int64_t i; (i = share.next.fetch_add(1)) < share.end;) s.body(i);
    }
  };
  openmp_parallel(take, &shared, (unsigned)threads, 0);
}

}  // namespace
