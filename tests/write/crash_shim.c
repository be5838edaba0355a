/* Counts the system calls of a process that write to a file system, and lets the n-th one kill it, fail or interrupt it.
 *
 * Loaded by LD_PRELOAD before the C library, which it replaces the wrappers of; each is a plain system call here.
 * crash_arm() sets what happens; crash_trace() tells which calls there were, a letter for each.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, KILL, FULL, INTERRUPT, TERMINATE, SHORT, BROKEN };
#define LONGEST 65536

static atomic_long count, starts, at;
static long nth, first;
static char start;
static int mode, no_exchange, armed;
static char trace[LONGEST + 1];

/* Calls are numbered from the `occurrence`-th call of letter `from` on, or from the first call where it is 0. */
void crash_arm(int new_mode, long new_nth, int without_exchange, char from, long occurrence) {
    mode = new_mode, nth = new_nth, no_exchange = without_exchange, start = from, first = occurrence;
    atomic_store(&count, 0);
    atomic_store(&starts, 0);
    atomic_store(&at, 0);
    armed = 1;
}

const char *crash_trace(void) {
    armed = 0;
    return trace;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Notes a call; gives its number, or 0 before the numbering starts. */
static long noted(char letter) {
    long call = atomic_fetch_add(&count, 1) + 1;
    if (call <= LONGEST) trace[call - 1] = letter;
    if (!start) return call;
    if (letter == start) atomic_fetch_add(&starts, 1);
    return atomic_load(&starts) < first ? 0 : atomic_fetch_add(&at, 1) + 1;
}

/* Whether a call fails for want of space. A disk that is full stays so, but names can be removed. */
static int full(char letter, int takes_space, long *its_number) {
    *its_number = 0;
    if (!armed) return 0;
    long number = *its_number = noted(letter);
    if (mode == KILL && number == nth && letter != 'w') die();
    if (number == nth && mode == INTERRUPT) syscall(SYS_kill, getpid(), SIGINT);
    if (number == nth && mode == TERMINATE) syscall(SYS_kill, getpid(), SIGTERM);
    return mode == FULL && number >= nth && nth && takes_space;
}

static int is_file(int fd) {
    struct stat found;
    return fd > 2 && !fstat(fd, &found) && S_ISREG(found.st_mode);
}

/* Where a network file system reports that what was written before did not reach its server. */
int close(int fd) {
    long number = 0;
    int flags = armed && is_file(fd) ? fcntl(fd, F_GETFL) : 0;
    struct stat found = {0};
    if (flags & (O_WRONLY | O_RDWR) && !fstat(fd, &found) && found.st_size) full('c', 0, &number);
    int done = syscall(SYS_close, fd);
    if (number && number == nth && mode == BROKEN) { errno = EIO; return -1; }
    return done;
}

/* How many bytes of a write go out: all of them, or half of them where the process is killed in the middle. */
static size_t allowed(int fd, size_t size, int *dies, int *fails) {
    *dies = *fails = 0;
    if (!armed || !is_file(fd)) return size;
    long number;
    *fails = full('w', 1, &number);
    if (mode == SHORT) return size > 7 ? 7 : size;
    *dies = mode == KILL && nth && number == nth;
    return *dies ? size / 2 : size;
}

#define WRITE(call, fd, size) \
    int dies, fails; \
    size_t part = allowed(fd, size, &dies, &fails); \
    if (fails) { errno = ENOSPC; return -1; } \
    ssize_t done = call; \
    if (dies) die(); \
    return done;

#define CHANGE(letter, takes_space, call) \
    long number; \
    if (full(letter, takes_space, &number)) { errno = ENOSPC; return -1; } \
    return call;

ssize_t write(int fd, const void *data, size_t size) { WRITE(syscall(SYS_write, fd, data, part), fd, size) }

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    WRITE(syscall(SYS_pwrite64, fd, data, part, at), fd, size)
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

/* Of the first buffer alone where not all of it may go out. Python's os.pwritev() calls pwritev2(). */
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags) {
    WRITE((part < parts[0].iov_len ? syscall(SYS_pwrite64, fd, parts[0].iov_base, part, at)
                                   : syscall(SYS_pwritev2, fd, parts, n, at, 0L, flags)),
          fd, parts[0].iov_len)
}
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags) {
    return pwritev64v2(fd, parts, n, at, flags);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) { return pwritev64v2(fd, parts, n, at, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return pwritev64v2(fd, parts, n, at, 0); }

static int opened(int folder, const char *path, int flags, int permissions) {
    long number;
    if ((flags & (O_CREAT | O_TRUNC)) && full('o', flags & O_CREAT, &number)) { errno = ENOSPC; return -1; }
    return syscall(SYS_openat, folder, path, flags, permissions);
}

#define OPENED(folder) \
    va_list rest; \
    va_start(rest, flags); \
    int permissions = flags & O_CREAT ? va_arg(rest, int) : 0; \
    va_end(rest); \
    return opened(folder, path, flags, permissions);

int open(const char *path, int flags, ...) { OPENED(AT_FDCWD) }
int open64(const char *path, int flags, ...) { OPENED(AT_FDCWD) }
int openat(int folder, const char *path, int flags, ...) { OPENED(folder) }
int openat64(int folder, const char *path, int flags, ...) { OPENED(folder) }

int rename(const char *a, const char *b) { CHANGE('r', 0, syscall(SYS_rename, a, b)) }
int renameat(int x, const char *a, int y, const char *b) { CHANGE('r', 0, syscall(SYS_renameat, x, a, y, b)) }
int renameat2(int x, const char *a, int y, const char *b, unsigned flags) {
    if (no_exchange) { errno = EINVAL; return -1; }
    CHANGE('x', 0, syscall(SYS_renameat2, x, a, y, b, flags))
}
int link(const char *a, const char *b) { CHANGE('l', 1, syscall(SYS_link, a, b)) }
int linkat(int x, const char *a, int y, const char *b, int flags) { CHANGE('l', 1, syscall(SYS_linkat, x, a, y, b, flags)) }
int symlink(const char *a, const char *b) { CHANGE('l', 1, syscall(SYS_symlink, a, b)) }
int unlink(const char *path) { CHANGE('u', 0, syscall(SYS_unlink, path)) }
int unlinkat(int folder, const char *path, int flags) { CHANGE('u', 0, syscall(SYS_unlinkat, folder, path, flags)) }
int rmdir(const char *path) { CHANGE('d', 0, syscall(SYS_rmdir, path)) }
int mkdir(const char *path, mode_t permissions) { CHANGE('m', 1, syscall(SYS_mkdir, path, permissions)) }
int mkdirat(int folder, const char *path, mode_t permissions) {
    CHANGE('m', 1, syscall(SYS_mkdirat, folder, path, permissions))
}
int fsync(int fd) { CHANGE('s', 1, syscall(SYS_fsync, fd)) }
int fdatasync(int fd) { CHANGE('s', 1, syscall(SYS_fdatasync, fd)) }
int syncfs(int fd) { CHANGE('s', 1, syscall(SYS_syncfs, fd)) }
int ftruncate64(int fd, off_t size) { CHANGE('t', 0, syscall(SYS_ftruncate, fd, size)) }
int ftruncate(int fd, off_t size) { CHANGE('t', 0, syscall(SYS_ftruncate, fd, size)) }
int truncate64(const char *path, off_t size) { CHANGE('t', 0, syscall(SYS_truncate, path, size)) }
int truncate(const char *path, off_t size) { CHANGE('t', 0, syscall(SYS_truncate, path, size)) }
