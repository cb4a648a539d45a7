// The threads of the OpenMP runtime that PyTorch brought, so that there is one pool in the process.
#pragma once

#include <stdint.h>

#include <atomic>

#ifdef DSQ_X86
#include <xmmintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

// GOMP_parallel, or null: one thread. Set by dsq_use_threads.
typedef void (*Parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
extern Parallel parallel;

namespace {

// Rounding to nearest and subnormals as IEEE has them, whatever the calling thread has set.
class StandardArithmetic {
#ifdef DSQ_X86
 public:
  StandardArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StandardArithmetic() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

}  // namespace

// Calls body(i) for each i in 0..count-1, on up to `threads` threads, each taking the next that is left.
template <class Body> void share_out(int64_t count, int threads, const Body& body) {
  if (!parallel || threads < 2 || count < 2) {
    [[maybe_unused]] StandardArithmetic standard;
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  struct Shared {
    const Body& body;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{body, count};
  auto take = [](void* data) {
    Shared& s = *(Shared*)data;
    [[maybe_unused]] StandardArithmetic standard;
    for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.body(i);
  };
  parallel(take, &shared, (unsigned)(threads < count ? threads : count), 0);
}
