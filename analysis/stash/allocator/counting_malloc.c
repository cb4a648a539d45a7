/* malloc with a count: loaded before the C library (LD_PRELOAD), it adds up what every caller in the process holds. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

/* glibc's own names of what is replaced here */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static _Atomic int64_t live_bytes;
static _Atomic int64_t peak_bytes;

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

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || (alignment & (alignment - 1)) || !alignment) return EINVAL;
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
