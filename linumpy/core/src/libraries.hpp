// libzstd, liblz4 and zlib, opened at run time: building the core needs none of their headers, and a missing library
// costs only its codecs. Declared here are the functions that the core calls, all of the libraries' stable interfaces.
#pragma once

#include "common.hpp"

struct ZSTD_DCtx_s;

namespace lc {

struct Zstd {
    ZSTD_DCtx_s *(*create)();
    size_t (*free)(ZSTD_DCtx_s *);
    size_t (*decompress)(ZSTD_DCtx_s *, void *, size_t, const void *, size_t);
    unsigned (*is_error)(size_t);
    const char *(*error_name)(size_t);
    unsigned long long (*content_size)(const void *, size_t);
    size_t (*frame_nbytes)(const void *, size_t);
    // Results of `content_size`.
    static constexpr u64 UNKNOWN = ~u64(0), INVALID = UNKNOWN - 1;
};

struct Lz4 { int (*decompress)(const char *, char *, int, int); };

struct ZlibStream {  // z_stream
    const u8 *next_in;
    unsigned avail_in;
    unsigned long total_in;
    u8 *next_out;
    unsigned avail_out;
    unsigned long total_out;
    const char *msg;
    void *state, *allocate, *free, *opaque;
    int data_type;
    unsigned long adler, reserved;
};
static_assert(sizeof(long) != 8 || sizeof(ZlibStream) == 112);

struct Zlib {
    int (*init)(ZlibStream *, int window, const char *version, int stream_nbytes);
    int (*inflate)(ZlibStream *, int flush);
    int (*end)(ZlibStream *);
    int (*uncompress)(u8 *, unsigned long *, const u8 *, unsigned long);
    const char *(*error)(int);
    enum State { OK = 0, STREAM_END = 1, BUFFER_ERROR = -5 };
    static constexpr const char *VERSION = "1.2.11";  // oldest supported; zlib compares the first digit with its own
};

// Open a library (lc_library) by its path or file name, unless it is open. Returns its path and version; throws
// std::runtime_error with the reason why it cannot be used.
std::string open_library(i64 library, const char *path);

// The functions of an open library; DecodeError if it is not open.
const Zstd &zstd();
const Lz4 &lz4();
const Zlib &zlib();

}  // namespace lc
