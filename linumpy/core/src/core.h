// The C interface of the native core: what linumpy/core/native.py declares to ctypes, record by record.
//
// Every function may be called from any thread, throws nothing, and none but the `lc_wait` functions, and those for files, waits for I/O.
// Integers are 64 bits wide so that records have no padding that the two languages could disagree on.
#ifndef LINUMPY_CORE_H
#define LINUMPY_CORE_H

#include <stdint.h>

#define LC_ABI 9
#define LC_MAX_RANK 6

#if defined(__GNUC__)
#define LC_API __attribute__((visibility("default")))
#else
#define LC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Why a job failed. `lc_error` carries the numbers; Python writes the sentence.
enum lc_error_code {
    LC_OK = 0,
    LC_OPEN = 1,  // number: errno
    LC_NOT_FILE = 2,  // a folder or a pipe, not a file
    LC_SIZE = 3,  // a: bytes of the file; b: bytes that a raw chunk has
    LC_REPLACED = 4,  // a: bytes when it was opened; b: bytes now
    LC_READ = 5,  // number: errno
    LC_SHORT = 6,  // a: bytes that were read; b: bytes that were wanted
    LC_INDEX = 7,  // text: what is wrong with the shard index
    LC_DECODE = 8,  // text: what the decoder says
    LC_GONE = 9,  // the array's metadata file is missing too
    LC_MEMORY = 10,  // a: bytes that could not be allocated
    LC_THREAD = 11,  // number: errno of the thread that could not be started
    LC_CLOSED = 12,
    LC_CANCELLED = 13,
    LC_INTERNAL = 14,  // text: an exception that no code above expected
    LC_DEVICE = 15,  // text: what the driver says
    LC_CHANGED = 16,  // a file of the metadata is not what it was when the layout was read
    LC_ENTRY = 17,  // text: what is wrong with the local header of an entry of a ZIP file
    LC_MISSING = 18,  // no such object; of a fetch only
    LC_REMOTE = 19,  // text: why a request to an object store failed
};

// Codes of dtypes, in the order that native.py lists them; LC_BFLOAT16 is a target only.
enum lc_dtype {
    LC_BOOL,
    LC_U8,
    LC_U16,
    LC_U32,
    LC_U64,
    LC_I8,
    LC_I16,
    LC_I32,
    LC_I64,
    LC_F16,
    LC_F32,
    LC_F64,
    LC_C64,
    LC_C128,
    LC_BFLOAT16,
};

enum lc_compressor { LC_NONE, LC_ZSTD, LC_LZ4, LC_ZLIB, LC_GZIP, LC_BLOSC };

// How a chunk was encoded; see linumpy.plan.codecs.DecodeChain.
typedef struct {
    int64_t is_encoded;  // 0: raw, and all below is 0
    int64_t compressor;
    int64_t inner;  // of Blosc: LC_LZ4, LC_ZSTD or LC_ZLIB
    int64_t stored_checksum;
    int64_t decoded_checksum;
    int64_t shuffle;  // bytes of an element, 0 without
} lc_chain;

// How arrays of one geometry are stored; see linumpy.plan.layout.ArrayLayout.
typedef struct {
    int64_t rank;
    int64_t chunk_shape[LC_MAX_RANK];
    int64_t stored_axes[LC_MAX_RANK];
    int64_t chunks_per_shard[LC_MAX_RANK];  // all 0: chunks are files
    int64_t index_at_end;
    int64_t index_big_endian;
    int64_t index_checksum;
    int64_t dtype;
    int64_t swapped;
    lc_chain chain;
} lc_geometry;

// A file as it was when it was looked at; all but the path is 0 where it was missing.
typedef struct {
    const char *path;
    int64_t device, inode, nbytes, written, changed;  // nanoseconds
} lc_look;

// An entry of a ZIP file that holds a stored object, uncompressed.
typedef struct {
    int64_t number;  // of the object in the grid of the array's objects, in C order
    int64_t header;  // offset of the entry's local header
    int64_t nbytes;
} lc_entry;

// One array. The strings are copied.
typedef struct {
    const char *prefix;  // of the path of each stored object: coordinates follow
    const char *separator;
    const char *metadata;  // file, or key of an object store, that is there as long as the array is
    const lc_look *looks;  // files of its metadata: a job fails by LC_CHANGED where one is another before it is planned
    int64_t look_count;
    // A ZIP file whose entries are the stored objects, as it was when its directory was read; NULL: objects are files.
    // The prefix begins with its path and a '/'; the name of the entry follows.
    const lc_look *archive;
    int64_t grid[LC_MAX_RANK];  // objects along each axis
    const lc_entry *entries;  // by number; objects without one are missing
    int64_t entry_count;
    // Number of the object store whose keys begin with the prefix; 0: objects are files. It has neither looks nor an
    // archive.
    int64_t store;
} lc_array;

// A kernel that decodes a slab of so many chunks. Each argument is `constant + base · (address of the slab) + status ·
// (address of the status words) + stored · (stored bytes of the slab, rounded up to 256)`.
#define LC_MAX_ARGUMENTS 12
typedef struct {
    int64_t function;  // CUfunction
    int64_t grid_x, grid_y, block, shared, argument_count;
    struct { int64_t constant, base, status, stored; } arguments[LC_MAX_ARGUMENTS];
} lc_launch;

// Where a slab of so many chunks has its parts: behind the stored bytes, from the slab's address on.
typedef struct {
    int64_t words, status, decoded;
    int64_t launches;  // kernels to launch
} lc_decode_layout;

// How chunks of one kind are decoded on a device, a slab at a time; offsets are from the slab's address.
typedef struct {
    int64_t chunks, stored_nbytes;  // of a slab, at most
    int64_t stored;  // where stored bytes begin
    int64_t slots;  // of device memory that a slab takes: 1, all, or 0 for the batch's own memory
    int64_t slab_nbytes;  // device memory, with its tables at the end
    // Bytes that the stored bytes and the weights of a slab may take. The weight of a chunk is `each`, and for zstd what
    // lies between its two steps: see linumpy.plan.decode.staging.
    int64_t capacity, each, has_pool, reordered;
    int64_t chunk_nbytes, chunk_stride, target_nbytes;  // decoded; from one decoded chunk to the next; with padding
    int64_t checksum_nbytes;  // behind the stored bytes
    int64_t counter, codec, shuffle;  // see linumpy.plan.decode.workspace.decode_words
    int64_t device_from;  // chunks at a time from which the device is faster than the host
    int64_t launch_count;
    const lc_launch *launches;  // (chunks + 1, launch_count): for each number of chunks, at most so many
    const lc_decode_layout *layouts;  // (chunks + 1,)
} lc_decode_plan;

// Scatter kernels of one conversion and rank: CUfunctions by the bytes of their unit, 1, 2, 4, 8 and 16; 0 for none.
typedef struct {
    int64_t rank;
    int64_t axes[LC_MAX_RANK];  // of the array, those that the kernel walks
    int64_t functions[5];
    int64_t is_copy;
} lc_scatter;

// What a batch needs beyond its regions where outputs are on a device. Plans are kept by the caller for good.
typedef struct {
    const lc_scatter *scatter;
    const lc_decode_plan *decode;  // NULL for raw chunks
    int64_t ready;  // CUevent behind which outputs may be written
    int64_t timed;  // whether the times of its kernels are wanted
    int64_t memory;  // for one slab at a time, where its decode plan takes no slots
} lc_on_device;

// One read of stored bytes into device memory, by GPUDirect Storage.
typedef struct {
    const char *path;
    int64_t offset, nbytes;
    int64_t address;
    int64_t result;  // bytes that were read; less than 0 where the read failed: it is repeated by plain system calls
} lc_direct_read;

// Carries out reads of one slab, and returns when all are done. Called by threads of the core.
typedef void (*lc_read_direct)(lc_direct_read *reads, int64_t count);

// One request to an object store.
typedef struct {
    int64_t store;
    const char *key;
    // Offset -1: the last bytes; nbytes -1: all, from 0 on; 0: none, only what describes the object.
    int64_t offset, nbytes;
    int64_t capacity;  // bytes that may be lent; where there are more, none are
    // Loans of earlier requests whose bytes are not used any more.
    const int64_t *returned;
    int64_t returned_count;
    // Written by the call:
    int64_t code;  // LC_OK, LC_MISSING, LC_REMOTE
    int64_t address, got;  // where the bytes lie, and how many
    int64_t loan;  // what they are given back by, in a later request; 0: nothing was lent
    int64_t size;  // of the object; -1: unknown
    int64_t version[2];  // differs for another content; both 0: the store does not tell
    char text[256];
} lc_fetch;

// Carries out a request, and returns when it is over; without a key it takes loans back, and no more. Called by threads of
// the core, several at a time.
typedef void (*lc_fetch_object)(lc_fetch *);

typedef struct {
    int64_t context;  // CUcontext
    int64_t slabs, pinned_nbytes;  // slabs that are filled, or under way
    int64_t slots, device_nbytes;  // of device memory for those that are under way; bytes of one, tables counted in
    int64_t rows;  // boxes of a slab at most
    int64_t timed;  // whether the times of all kernels are wanted
    lc_read_direct direct;  // NULL: stored bytes pass through pinned memory
    const lc_scatter *keep;  // copies bytes of one dimension; NULL where no chunks are kept
} lc_device;

// Regions of arrays of one geometry. Arrays of numbers are C-contiguous and copied.
typedef struct {
    const lc_geometry *geometry;
    const lc_array *arrays;
    int64_t array_count;
    int64_t region_count;
    const int64_t *array;  // (regions,): which array each region is of
    const int64_t *start;  // (regions, rank)
    const int64_t *stop;  // (regions, rank)
    const int64_t *strides;  // (regions, rank): bytes between neighbours in the output
    const int64_t *address;  // (regions,): first element of the output
    int64_t target;  // dtype of the outputs
    uint8_t fill[16];  // fill value as an element of the outputs
    int64_t one_job;  // 1: all regions are one job; 0: one job a region
    const lc_on_device *on_device;  // NULL for outputs in host memory
} lc_batch;

typedef struct {
    int64_t code;
    int64_t number;
    int64_t a;
    int64_t b;
    int64_t object[LC_MAX_RANK];  // coordinates of the stored object
    int64_t chunk[LC_MAX_RANK];  // coordinates of the (inner) chunk
    int64_t offset;  // bytes of the chunk in its shard
    int64_t nbytes;
    char text[256];
} lc_error;

typedef struct {
    int64_t chunks;
    int64_t filled;
    int64_t decoded;
    int64_t bytes_read;
    int64_t files_opened;
    int64_t reads_repeated;  // that failed by GPUDirect Storage
    double seconds;
    double decode_seconds;  // of the host's threads, chunks that several jobs want counted for each
    double device_decode_seconds;  // of the slabs that hold its chunks; 0 where they were not timed
    double device_scatter_seconds;  // likewise
} lc_report;

typedef struct {
    int64_t jobs;
    int64_t chunks;
    int64_t boxes;
    int64_t tasks;
    int64_t bytes_read;
    int64_t index_hits;
    int64_t index_misses;
    int64_t files_opened;
    int64_t decoded;  // chunks that the host decoded
    int64_t kept_hits, kept_misses, kept_nbytes;  // chunks that are kept on the device
    int64_t slabs;  // that were carried out on the device
    // Of slabs that were timed: how many were copied up, and how many the device decoded, with their bytes.
    int64_t copies, copied_nbytes, slabs_decoded, decoded_nbytes;
    double plan_seconds;
    double read_seconds;
    double decode_seconds;
    double copy_seconds;
    double device_copy_seconds, device_decode_seconds, device_scatter_seconds;
} lc_stats;

typedef struct lc_reader lc_reader;
typedef struct lc_job lc_job;

LC_API int64_t lc_abi(void);
// Bytes of the records above, in the order of declaration: chain, geometry, array, batch, error, report, stats,
// launch, decode plan, scatter, on_device, device, direct read, look, entry, fetch.
LC_API void lc_record_sizes(int64_t sizes[17]);
// What carries out requests to object stores for all readers of the process, and how many it is asked for at a time.
LC_API void lc_set_fetch(lc_fetch_object, int64_t requests);

// `device` is NULL for a reader into host memory. Returns NULL and writes why to `text` (256 bytes).
LC_API lc_reader *lc_reader_new(int64_t threads, int64_t index_nbytes, const lc_device *device, char *text);
// Give a reader its device memory, before the first batch: its slots, one behind the other, and memory for chunks that are
// kept (0 without). It belongs to the caller, until the reader is closed and nothing is under way.
LC_API void lc_reader_memory(lc_reader *, int64_t slots, int64_t kept, int64_t kept_nbytes);
// Take no further batch, and give up what no thread has begun.
LC_API void lc_reader_close(lc_reader *);
// Whether nothing is under way any more; waits for it so many seconds.
LC_API int64_t lc_wait_closed(lc_reader *, double seconds);
LC_API void lc_reader_delete(lc_reader *);
LC_API void lc_reader_stats(lc_reader *, lc_stats *);

// Queue a batch; writes a handle for each job. Returns 0; 1 where too much is queued: wait for capacity and call again.
LC_API int64_t lc_submit(lc_reader *, const lc_batch *, lc_job **jobs);
LC_API int64_t lc_wait_capacity(lc_reader *, double seconds);

// Whether a job is over; the second one waits for it so many seconds.
LC_API int64_t lc_job_done(lc_job *);
LC_API int64_t lc_wait_job(lc_job *, double seconds);
// Whether all of some jobs are over; the second one waits for them so many seconds, and returns -1 where they never end.
LC_API int64_t lc_jobs_over(lc_job *const *jobs, int64_t count);
LC_API int64_t lc_wait_jobs(lc_job *const *jobs, int64_t count, double seconds);
// Of jobs that are over: the first one from `first` on that has failed; -1 for none.
LC_API int64_t lc_jobs_failed(lc_job *const *jobs, int64_t count, int64_t first);
LC_API void lc_jobs_release(lc_job *const *jobs, int64_t count);
// Give a job up; 0 where it is over already.
LC_API int64_t lc_job_cancel(lc_job *);
// Of a job that is over. A job without error has code LC_OK.
LC_API void lc_job_error(lc_job *, lc_error *);
LC_API void lc_job_report(lc_job *, lc_report *);
LC_API void lc_job_release(lc_job *);

// Decode one chunk into `out`, all of it. Returns 0, or writes what is wrong to `text` (256 bytes) and returns a code.
LC_API int64_t lc_decode(const lc_chain *, const void *stored, int64_t nbytes, void *out, int64_t out_nbytes,
                         char *text);

// Files to write, each from bytes that lie together.
typedef struct {
    const char *const *paths;
    int64_t count;
    void *base;
    const int64_t *bounds;  // where the bytes of each begin and end, from `base` on
    int64_t with_checksum;  // whether their CRC-32C follows
    const char *suffix;  // of the name of a file until it is complete; empty: it has its name at once
} lc_output;

// Write files, in the calling thread. Returns 0, or an errno and the number of the file.
LC_API int64_t lc_write_files(const lc_output *, int64_t *number);

// List all files below a folder, by name: "name\0size nanoseconds inode\n", in memory that `lc_free` frees. Returns an
// errno.
LC_API int64_t lc_list_files(const char *folder, char **text, int64_t *nbytes);
LC_API void lc_free(void *);

// In a forked child: forget the threads of the parent. At the end of the process: join all threads.
LC_API void lc_after_fork(void);
LC_API void lc_shutdown(void);

// For tests: let the `nth` next call (0: none) of a kind fail with an errno. Kinds: 0 open, 1 fstat, 2 pread, 3 close,
// 4 starting a thread, 5 allocating. A negative errno of pread makes the read that many bytes shorter.
LC_API void lc_fail_next(int64_t kind, int64_t nth, int64_t number);

#ifdef __cplusplus
}
#endif
#endif
