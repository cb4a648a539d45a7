/* malloc with a count: loaded before the C library (LD_PRELOAD), it adds up what every caller in the process holds. The
 * n-th allocation of a tensor's memory can be made to fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* glibc's own names of what is replaced here */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static _Atomic int64_t live_bytes;
static _Atomic int64_t peak_bytes;
static _Atomic int64_t until_failure; /* allocations of tensors; 0 or less: none fails */

static void *counted(void *block) {
    if (block) {
        int64_t size = (int64_t)malloc_usable_size(block);
        int64_t live = atomic_fetch_add(&live_bytes, size) + size;
        int64_t peak = atomic_load(&peak_bytes);
        while (live > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, live)) {}
    }
    return block;
}

static void uncount(void *block) { atomic_fetch_sub(&live_bytes, (int64_t)malloc_usable_size(block)); }

void *malloc(size_t size) { return counted(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }

void *realloc(void *old, size_t size) {
    int64_t before = old ? (int64_t)malloc_usable_size(old) : 0;
    void *block = __libc_realloc(old, size);
    if (block || size == 0) atomic_fetch_sub(&live_bytes, before); /* where it fails, the old block stays */
    return counted(block);
}

void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void *valloc(size_t size) { return memalign((size_t)sysconf(_SC_PAGESIZE), size); }

/* Whether this is the tensor that shall fail. PyTorch's tensors are allocated by libc10; oneDNN, which is another caller of
 * posix_memalign, crashes by itself where it gets no scratch memory. */
static int fails(void *caller) {
    Dl_info info;
    if (atomic_load(&until_failure) <= 0 || !dladdr(caller, &info) || !strstr(info.dli_fname, "libc10")) return 0;
    return atomic_fetch_sub(&until_failure, 1) == 1;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || (alignment & (alignment - 1)) || !alignment) return EINVAL;
    if (fails(__builtin_return_address(0))) return ENOMEM;
    void *found = memalign(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void free(void *block) {
    if (block) uncount(block);
    __libc_free(block);
}

/* The count, for the process that is counted. */
int64_t counting_malloc_live(void) { return atomic_load(&live_bytes); }
int64_t counting_malloc_peak(void) { return atomic_load(&peak_bytes); }
void counting_malloc_reset_peak(void) { atomic_store(&peak_bytes, atomic_load(&live_bytes)); }

void counting_malloc_fail(int64_t number) { atomic_store(&until_failure, number); }
int64_t counting_malloc_until_failure(void) { return atomic_load(&until_failure); }
