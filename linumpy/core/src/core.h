// The C interface of the native core. linumpy/core/native.py declares the same records and functions to ctypes.
//
// Every function may be called from any thread and throws nothing. Only the `lc_wait` functions, `lc_shutdown`,
// `lc_open_library`, `lc_write_files` and `lc_list_files` wait for I/O. Integers are 64 bits wide, so that records have no padding that C
// and Python could lay out differently.
#ifndef LINUMPY_CORE_H
#define LINUMPY_CORE_H

#include <stdint.h>

#define LC_ABI 15
#define LC_MAX_RANK 6

#if defined(__GNUC__)
#define LC_API __attribute__((visibility("default")))
#else
#define LC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Why a job failed. `number`, `a`, `b` and `text` are fields of `lc_error`, from which Python writes the message.
enum lc_error_code {
    LC_OK = 0,
    LC_OPEN = 1,  // number: errno; a: number of files that the process may have open, if they are; else 0
    LC_NOT_FILE = 2,  // a folder or a pipe, not a file
    LC_SIZE = 3,  // a: bytes of the file; b: bytes that a raw chunk has
    LC_REPLACED = 4,  // the file or object has changed since it was located; a: bytes then; b: bytes now
    LC_READ = 5,  // number: errno
    LC_SHORT = 6,  // a: bytes that were read; b: bytes that were requested
    LC_INDEX = 7,  // text: what is wrong with the shard index
    LC_DECODE = 8,  // text: the decoder's message
    LC_GONE = 9,  // a stored object is missing, and so is the array's metadata file
    LC_MEMORY = 10,  // a: bytes that could not be allocated
    LC_THREAD = 11,  // number: errno of the thread that could not be started
    LC_CLOSED = 12,
    LC_CANCELLED = 13,
    LC_INTERNAL = 14,  // text: an exception that no code above expected
    LC_DEVICE = 15,  // text: the driver's message
    LC_CHANGED = 16,  // a metadata file has changed since the layout was read
    LC_ENTRY = 17,  // text: what is wrong with the local header of an entry of a ZIP file
    LC_MISSING = 18,  // the object store has no such object
    LC_REMOTE = 19,  // text: why a request to an object store failed
    LC_BROKEN = 20,  // only of lc_fetch: the response broke off, so that the request is repeated; text as of LC_REMOTE
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

// Libraries of decoders, which the core opens at run time.
enum lc_library { LC_LIBZSTD, LC_LIBLZ4, LC_LIBZ };

// How a chunk was encoded; see linumpy.plan.codecs.DecodeChain.
typedef struct {
    int64_t is_encoded;  // 0: raw, and all other fields are 0
    int64_t compressor;
    int64_t inner;  // with Blosc, the compressor of its streams: LC_LZ4, LC_ZSTD or LC_ZLIB
    int64_t stored_checksum;
    int64_t decoded_checksum;
    int64_t shuffle;  // bytes of an element of numcodecs' shuffle filter; 0 without the filter
} lc_chain;

// How arrays of one geometry are stored; see linumpy.plan.layout.ArrayLayout.
typedef struct {
    int64_t rank;
    int64_t chunk_shape[LC_MAX_RANK];
    int64_t stored_axes[LC_MAX_RANK];
    int64_t chunks_per_shard[LC_MAX_RANK];  // all 0: no shards, each chunk is a stored object
    int64_t index_at_end;
    int64_t index_big_endian;
    int64_t index_checksum;
    int64_t dtype;
    int64_t swapped;
    lc_chain chain;
} lc_geometry;

// The state of a file when it was last checked; all numbers are 0 if the file did not exist.
typedef struct {
    const char *path;
    int64_t device, inode, nbytes;
    int64_t written, changed;  // times of the last modification (mtime) and status change (ctime), in nanoseconds
} lc_look;

// An entry of a ZIP file that holds a stored object, uncompressed.
typedef struct {
    int64_t number;  // index of the object in the grid of the array's objects, in C order
    int64_t header;  // offset of the entry's local header
    int64_t nbytes;
} lc_entry;

// One array. The strings are copied.
typedef struct {
    const char *prefix;  // path (or key) of each stored object up to the coordinates of the object
    const char *separator;
    const char *metadata;  // file, or key of an object store, that exists as long as the array does
    // The array's metadata files: if one of them has changed when a job is planned, the job fails with LC_CHANGED.
    const lc_look *looks;
    int64_t look_count;
    // The ZIP file whose entries are the stored objects, in its state when its directory was read; NULL: no ZIP file.
    // A path is then the ZIP file's path, a '/' and the name of the entry.
    const lc_look *archive;
    int64_t grid[LC_MAX_RANK];  // objects along each axis
    const lc_entry *entries;  // sorted by number; objects without an entry are missing
    int64_t entry_count;
    // Number of the object store that has the objects; 0: objects are files or entries of a ZIP file. An array in an
    // object store has neither looks nor an archive.
    int64_t store;
} lc_array;

// The launch of a kernel that decodes a slab. Each argument is `constant + base · (address of the slab's device memory)
// + status · (address of the chunks' status) + stored · (stored bytes of the slab, rounded up to a multiple of 256)`.
#define LC_MAX_ARGUMENTS 12
typedef struct {
    int64_t function;  // CUfunction
    int64_t grid_x, grid_y, block, shared, argument_count;
    struct { int64_t constant, base, status, stored; } arguments[LC_MAX_ARGUMENTS];
} lc_launch;

// Offsets of the parts of a slab in device memory. They count from the slab's address plus its stored bytes, rounded up
// to a multiple of 256.
typedef struct {
    int64_t words, status, decoded;
    int64_t launches;  // kernels to launch
} lc_decode_layout;

// How chunks of one kind are decoded on a device, a slab at a time.
typedef struct {
    int64_t chunks, stored_nbytes;  // capacity of a slab
    int64_t stored;  // offset of the stored bytes from the slab's address
    int64_t slots;  // slots of device memory that a slab takes: 1, all, or 0 for memory of the batch
    int64_t slab_nbytes;  // size of the slab's device memory, including the tables at its end
    // Capacity in bytes for the stored bytes and the weights of a slab. The weight of a chunk is `each` plus, if
    // `has_pool`, an estimate of zstd's intermediate data beyond `reordered` bytes: see linumpy.plan.decode.workspace.
    int64_t capacity, each, has_pool, reordered;
    int64_t chunk_nbytes;  // decoded bytes of a chunk
    int64_t chunk_stride;  // bytes between decoded chunks
    int64_t target_nbytes;  // decoded bytes of a chunk, including its checksum
    int64_t checksum_nbytes;  // size of the checksum that follows the stored bytes
    int64_t counter;  // whether the counter of streams begins with the number of chunks; else kernels count the streams
    int64_t codec;  // of the chunks' records `Stream`: linumpy.plan.decode.workspace.CODES
    int64_t shuffle;  // bytes of an element of numcodecs' shuffle filter; 0 without the filter
    int64_t device_from;  // number of chunks in flight from which the device is faster than the host
    int64_t launch_count;
    const lc_launch *launches;  // (chunks + 1, launch_count): for each number of chunks, whose layout says how many
    const lc_decode_layout *layouts;  // (chunks + 1,)
} lc_decode_plan;

// Scatter kernels of one conversion and rank.
typedef struct {
    int64_t rank;
    int64_t axes[LC_MAX_RANK];  // axes of the array that the kernels iterate over
    int64_t functions[5];  // CUfunctions for units of 1, 2, 4, 8 and 16 bytes; 0 for none
    int64_t is_copy;  // whether elements are copied without conversion
} lc_scatter;

// Properties of a batch with outputs on a device. The caller never frees the records that `scatter` and `decode` point
// to.
typedef struct {
    const lc_scatter *scatter;
    const lc_decode_plan *decode;  // NULL for raw chunks
    int64_t ready;  // CUevent after which outputs may be written; 0: at once
    int64_t timed;  // whether the batch's kernels are timed
    int64_t memory;  // address of memory for one slab at a time, if its decode plan takes no slots
} lc_on_device;

// One read of stored bytes into device memory, by GPUDirect Storage.
typedef struct {
    const char *path;
    int64_t offset, nbytes;
    int64_t address;
    int64_t result;  // bytes that were read; less than 0 on failure. System calls repeat a read of less than `nbytes`
} lc_direct_read;

// Carries out the reads of one slab, and returns when all are complete. Called by threads of the core.
typedef void (*lc_read_direct)(lc_direct_read *reads, int64_t count);

// One request to an object store.
typedef struct {
    int64_t store;
    const char *key;
    // The range to request. With offset -1: the last `nbytes` bytes. With offset 0 and nbytes -1: the whole object.
    // With nbytes 0: no bytes, only size and version.
    int64_t offset, nbytes;
    int64_t capacity;  // maximum number of bytes to lend; a longer response lends none
    // Handles of the loans, by earlier requests, that end now: their bytes are no longer used.
    const int64_t *returned;
    int64_t returned_count;
    // Written by the call:
    int64_t code;  // LC_OK, LC_MISSING, LC_REMOTE, LC_BROKEN
    int64_t address, got;  // address and number of the lent bytes
    int64_t loan;  // handle of the lent bytes, which a later request returns; 0: nothing was lent
    int64_t size;  // bytes of the object; -1: unknown
    int64_t version[2];  // identifies the content; both 0: the store reports no version
    char text[256];
} lc_fetch;

// Carries out a request, and returns when the request is complete. A record without a key only returns loans. Called by
// several threads of the core at the same time.
typedef void (*lc_fetch_object)(lc_fetch *);

// The device of a reader.
typedef struct {
    int64_t context;  // CUcontext
    int64_t slabs, pinned_nbytes;  // number of slabs, and bytes of pinned memory of each
    int64_t slots, device_nbytes;  // slots of device memory for slabs in flight, and bytes of each, including tables
    int64_t rows;  // maximum number of boxes in a slab
    int64_t timed;  // whether all kernels are timed
    lc_read_direct direct;  // NULL: stored bytes pass through pinned memory
    const lc_scatter *keep;  // kernel that copies decoded chunks to the cache; NULL if no chunks are kept
} lc_device;

// Regions of arrays of one geometry. Arrays of numbers are C-contiguous and copied.
typedef struct {
    const lc_geometry *geometry;
    const lc_array *arrays;
    int64_t array_count;
    int64_t region_count;
    const int64_t *array;  // (regions,): index of each region's array
    const int64_t *start;  // (regions, rank)
    const int64_t *stop;  // (regions, rank)
    const int64_t *strides;  // (regions, rank): bytes between neighbours in the output
    const int64_t *address;  // (regions,): address of the output's first element
    int64_t target;  // dtype of the outputs
    uint8_t fill[16];  // fill value as an element of the outputs
    int64_t one_job;  // 1: one job for all regions; 0: one job per region
    const lc_on_device *on_device;  // NULL for outputs in host memory
} lc_batch;

// The first error of a job.
typedef struct {
    int64_t code;  // lc_error_code, which says what the next three numbers and `text` mean
    int64_t number;
    int64_t a;
    int64_t b;
    int64_t object[LC_MAX_RANK];  // coordinates of the stored object
    int64_t chunk[LC_MAX_RANK];  // coordinates of the (inner) chunk
    int64_t offset, nbytes;  // byte range of a chunk that cannot be decoded in its stored object; else 0
    char text[256];
} lc_error;

// The work for one job that is over.
typedef struct {
    int64_t chunks;  // each counts once for each region that touches it; so do the next three
    int64_t filled;  // missing chunks, which become the fill value
    int64_t decoded;  // chunks that the host decoded
    int64_t bytes_read;  // stored bytes of chunks, and of shard indexes
    int64_t files_opened;  // files that were opened, or requests to object stores
    int64_t reads_repeated;  // by system calls, after GPUDirect Storage failed
    double seconds;
    double decode_seconds;  // of the host's threads; a chunk that several jobs want counts for each
    double device_decode_seconds;  // of the slabs that hold its chunks; 0 if they were not timed
    double device_scatter_seconds;  // likewise
} lc_report;

// Totals of a reader since it was created. Seconds are sums over threads and slabs.
typedef struct {
    int64_t jobs;  // that are over
    int64_t chunks;  // that were read; those of the cache on the device are not
    int64_t boxes;  // that were planned
    int64_t tasks;  // that were planned
    int64_t bytes_read;  // stored bytes of chunks
    int64_t index_hits;  // shard indexes that the cache of the host had
    int64_t index_misses;
    int64_t files_opened;  // files that were opened, or requests to object stores
    int64_t hedges;  // requests that were sent a second time because the response was late
    int64_t decoded;  // chunks that the host decoded
    int64_t kept_hits, kept_misses, kept_nbytes;  // chunks that the cache had, or not; its bytes in use
    int64_t slabs;  // completed on the device
    // Of timed slabs: number and bytes copied to the device, number and bytes decoded there.
    int64_t copies, copied_nbytes, slabs_decoded, decoded_nbytes;
    double plan_seconds;
    double read_seconds;
    double decode_seconds;  // on the host
    double copy_seconds;  // of decoded chunks to outputs in host memory
    double device_copy_seconds, device_decode_seconds, device_scatter_seconds;
} lc_stats;

typedef struct lc_reader lc_reader;
typedef struct lc_job lc_job;

LC_API int64_t lc_abi(void);
// Bytes of the records above, in the order of declaration: chain, geometry, array, batch, error, report, stats,
// launch, decode plan, scatter, on_device, device, direct read, look, entry, fetch; and of lc_output.
LC_API void lc_record_sizes(int64_t sizes[17]);
// Set the function that carries out requests to object stores for all readers of the process.
LC_API void lc_set_fetch(lc_fetch_object);
// Set the maximum number of reads of slow storage, and of requests, in flight in the process. Has an effect before the
// first reader is made.
LC_API void lc_set_reads(int64_t count);
// Set whether requests are sent a second time if the response is late (1, the default, or 0).
LC_API void lc_set_hedging(int64_t allowed);

// Create a reader. `threads`: number of threads that work is cut for; `index_nbytes`: memory for shard indexes;
// `device`: NULL for outputs in host memory. On failure returns NULL and writes the reason to `text` (256 bytes).
LC_API lc_reader *lc_reader_new(int64_t threads, int64_t index_nbytes, const lc_device *device, char *text);
// Give a reader its memory before the first batch: contiguous slots on the device, and memory for kept chunks (0: none),
// which is host memory if the reader has no device. The caller frees the memory after the reader is closed and nothing
// is in flight.
LC_API void lc_reader_memory(lc_reader *, int64_t slots, int64_t kept, int64_t kept_nbytes);
// Refuse further batches, and cancel the jobs of regions that are not planned yet.
LC_API void lc_reader_close(lc_reader *);
// Wait up to `seconds` until nothing is in flight, or the threads of the process have been stopped; returns whether
// that is so.
LC_API int64_t lc_wait_closed(lc_reader *, double seconds);
LC_API void lc_reader_delete(lc_reader *);
LC_API void lc_reader_stats(lc_reader *, lc_stats *);

// Queue a batch, and write a handle for each job. Returns 0 on success; 1 if the queue is full: wait for capacity and
// call again; 2 if there is no memory; 3 if a chunk or the index of a shard has more than 2^60 bytes.
LC_API int64_t lc_submit(lc_reader *, const lc_batch *, lc_job **jobs);
// Wait up to `seconds` until the queue has capacity or the reader is closed; returns whether that is so.
LC_API int64_t lc_wait_capacity(lc_reader *, double seconds);

// Return whether a job is over. `lc_wait_job` is `lc_wait_jobs` for one job. A handle that is NULL, of a job that was not
// submitted or is released, counts as that of a cancelled job in all functions of jobs but `lc_job_report`.
LC_API int64_t lc_job_done(lc_job *);
LC_API int64_t lc_wait_job(lc_job *, double seconds);
// Return whether all `count` jobs are over. `lc_wait_jobs` waits up to `seconds`, and returns 1 if they are over, 0 if
// not, and -1 if the threads of the process have been stopped, so that the jobs never end. The waiting thread may carry
// out the work itself.
LC_API int64_t lc_jobs_over(lc_job *const *jobs, int64_t count);
LC_API int64_t lc_wait_jobs(lc_job *const *jobs, int64_t count, double seconds);
// Return the seconds since `lc_wait_jobs` last returned in the calling thread: how long it waited for Python's lock.
LC_API double lc_since_wait(void);
// Return the index of the first failed job from index `first` on; -1 if none has failed. The jobs must be over.
LC_API int64_t lc_jobs_failed(lc_job *const *jobs, int64_t count, int64_t first);
// If all `count` jobs are over, release them and set their handles to NULL; returns whether that is so. A caller that is
// interrupted afterwards may call again.
LC_API int64_t lc_jobs_release(lc_job **jobs, int64_t count);
// Cancel a job; returns 0 if the job was over already, else 1: the job will end with LC_CANCELLED.
LC_API int64_t lc_job_cancel(lc_job *);
// Get the error and the report of a job that is over. A job without error has code LC_OK.
LC_API void lc_job_error(lc_job *, lc_error *);
LC_API void lc_job_report(lc_job *, lc_report *);

// Open a library by its path or file name, unless it is open; before the first reader, and once more with another path
// if it failed. Returns 0 with the library's path and version in `text` (1024 bytes), or 1 with the reason why it cannot
// be used: chunks that need it then fail with LC_DECODE.
LC_API int64_t lc_open_library(int64_t library, const char *path, char *text);

// Decode one chunk, which must fill `out`. Returns 0, or an error code with the reason in `text` (256 bytes).
LC_API int64_t lc_decode(const lc_chain *, const void *stored, int64_t nbytes, void *out, int64_t out_nbytes,
                         char *text);

// Files to write, each from contiguous bytes.
typedef struct {
    const char *const *paths;
    int64_t count;
    void *base;
    const int64_t *bounds;  // (count, 2): offsets from `base` of the begin and end of each file's bytes
    int64_t with_checksum;  // whether the CRC-32C of a file's bytes is appended to the file
    const char *suffix;  // appended to a file's name until the file is complete; empty: none
} lc_output;

// Write files in the calling thread. Returns 0, or an errno; `number` is then the index of the file that failed.
LC_API int64_t lc_write_files(const lc_output *, int64_t *number);

// List all files below a folder and its subfolders, sorted by name: for each file "name\0size nanoseconds inode\n",
// where nanoseconds are the time of the last modification. `lc_free` frees the text. Returns 0 or an errno.
LC_API int64_t lc_list_files(const char *folder, char **text, int64_t *nbytes);
LC_API void lc_free(void *);

// Find samples along rays on the host. `batch` is `struct Batch` of rays/cuda/trace.cu, with addresses of host memory;
// `images`, `grows` and `lengths` are its definitions IMAGES, CONE and LENGTHS. Returns -1, and does nothing, if a size
// of a record differs, else 0.
LC_API int64_t lc_trace_rays(int64_t images, int64_t grows, int64_t lengths, const void *batch, int64_t nbytes,
                             int64_t image_nbytes);

// Write the coordinates of `count` random points on the host, from the one of number `begin` on. `draw` and `boxes` are
// the records of sampling/cuda/draw.cu; without `boxes` points are drawn one by one, else those of a window whose boxes
// begin at `starts`, by the weights of `draw` if it is given. `ids` and `cumulative`: the cells of weights, or null.
LC_API int64_t lc_draw_points(float *coords, const int64_t *ids, const uint64_t *cumulative, const int64_t *starts,
                              int64_t begin, int64_t count, const void *draw, const void *boxes);

// `lc_after_fork`, in a forked child: forget the threads of the parent. `lc_shutdown`, at exit: join all threads.
LC_API void lc_after_fork(void);
LC_API void lc_shutdown(void);

// For tests: make the `nth` next call (0: none) of a kind fail with the errno `number`. Kinds: 0 open, 1 fstat, 2
// pread, 3 close, 4 starting a thread, 5 allocating. With a negative number, pread reads that many bytes less instead.
// Kind 6: delay each of the `nth` next reads of files by `number` microseconds.
LC_API void lc_fail_next(int64_t kind, int64_t nth, int64_t number);

#ifdef __cplusplus
}
#endif
#endif
