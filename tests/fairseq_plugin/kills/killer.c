/* The C library's file operations, of which the n-th in one folder ends the process as SIGKILL does: no clean-up, and a
 * write that was cut off half way. Loaded by LD_PRELOAD; killer_arm names the folder and n. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long left = -1; /* operations before the end; -1: none is counted */
static long seen;

void killer_arm(const char *name, long operations) {
    strncpy(folder, name, sizeof folder - 1);
    left = operations;
    seen = 0;
}

long killer_seen(void) { return seen; }

static int last(const char *path) {
    if (!folder[0] || strncmp(path, folder, strlen(folder)) != 0) return 0;
    seen++;
    return left > 0 && --left == 0;
}

static int last_of(int descriptor) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return last(path);
}

static void end(void) { kill(getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int descriptor, const void *bytes, size_t count) {
    if (last_of(descriptor)) {
        REAL(write)(descriptor, bytes, count / 2);
        end();
    }
    return REAL(write)(descriptor, bytes, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    if (last_of(descriptor)) {
        REAL(writev)(descriptor, parts, count / 2);
        end();
    }
    return REAL(writev)(descriptor, parts, count);
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t count) {
    if (last_of(to)) {
        REAL(sendfile64)(to, from, offset, 1000);
        end();
    }
    return REAL(sendfile64)(to, from, offset, count);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t count) { return sendfile64(to, from, offset, count); }

int fsync(int descriptor) {
    if (last_of(descriptor)) end();
    return REAL(fsync)(descriptor);
}

int rename(const char *from, const char *to) {
    if (last(to)) end();
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    if (last(path)) end();
    return REAL(unlink)(path);
}

int mkdir(const char *path, mode_t mode) {
    if (last(path)) end();
    return REAL(mkdir)(path, mode);
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    if (flags & (O_WRONLY | O_RDWR) && last(path)) end();
    return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = va_arg(more, mode_t);                         \
        va_end(more);                                               \
        return opened(#name, path, flags, mode);                    \
    }
OPEN(open)
OPEN(open64)
