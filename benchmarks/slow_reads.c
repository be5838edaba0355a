/* Preloaded: each read of a file below $SLOW_FOLDER takes $SLOW_MS more, as on storage behind a network. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static void delay(int descriptor) {
    const char *folder = getenv("SLOW_FOLDER"), *text = getenv("SLOW_MS");
    const double ms = text ? atof(text) : 0;
    char link[32], path[4096];
    if (!folder || ms <= 0) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) || !strstr(path, "/c/")) return;
    const struct timespec time = {(time_t)(ms / 1e3), (long)(ms * 1e6) % 1000000000};
    nanosleep(&time, NULL);
}

#define SLOW(name, offset_type)                                                                        \
    ssize_t name(int descriptor, void *to, size_t nbytes, offset_type offset) {                        \
        static ssize_t (*next)(int, void *, size_t, offset_type);                                      \
        if (!next) next = (ssize_t (*)(int, void *, size_t, offset_type))dlsym(RTLD_NEXT, #name);      \
        delay(descriptor);                                                                             \
        return next(descriptor, to, nbytes, offset);                                                   \
    }
SLOW(pread, off_t)
SLOW(pread64, off64_t)

ssize_t read(int descriptor, void *to, size_t nbytes) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    delay(descriptor);
    return next(descriptor, to, nbytes);
}
