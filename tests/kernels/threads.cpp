// OpenMP's two functions over threads that begin and end with each call: ThreadSanitizer knows what orders these, which
// it does not of the barriers of an OpenMP runtime that was built without it.
#include <thread>
#include <vector>

static thread_local int number;

extern "C" int thread_number() { return number; }

extern "C" void parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; i++) {
    others.emplace_back([=] {
      number = (int)i;
      body(data);
    });
  }
  body(data);
  for (std::thread& other : others) other.join();
}
