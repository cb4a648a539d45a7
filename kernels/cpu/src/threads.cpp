#include "threads.h"

OpenMpParallel openmp_parallel = nullptr;
OpenMpThreadNumber openmp_thread_number = nullptr;

void use_threads(OpenMpParallel parallel, OpenMpThreadNumber thread_number) {
  openmp_parallel = parallel;
  openmp_thread_number = thread_number;
}
