// Chunks → Blosc 1 frames around streams that another kernel encodes. Format: README_CHUNK_FORMAT.rst of the C-Blosc
// project; blosc.cu decodes the same frames.
//
// `shuffle` brings each block of a chunk into the order of its bytes or bits, so that streams lie side by side: those
// of all whole blocks, then the last blocks of all chunks, which are shorter. Those are encoded. `blosc_sizes` decides
// what is stored as it is, and adds up; `blosc_write` writes the frames.
//
// Readers know how blocks are split from the flag NOT_SPLIT, and C-Blosc before 1.11 from the sizes alone: for LZ4, a
// block is therefore split just where those would, and the flag is set where it is not. C-Blosc 1.x has sorted the bits
// of blocks only that have a multiple of 8 elements; other ones stay as they are.

#include "blosc.cuh"
#include "encode.cuh"

// Encoded streams: packed, with offsets; or in slots, with sizes; or none, and all is stored as it is.
struct Encoded {
    const u8 *first;
    const i64 *offsets;
    i64 stride;
    const u32 *sizes;
    __device__ const u8 *stream(i64 number) const { return first + (offsets ? offsets[number] : number * stride); }
    __device__ u32 size(i64 number) const {
        if (offsets) return static_cast<u32>(offsets[number + 1] - offsets[number]);
        return sizes ? sizes[number] : ~0u;
    }
};

// How chunks of `n` bytes are cut: `whole` blocks of `block` bytes, each split into `splits` streams, and one of `rest`
// bytes, if there are any.
struct Cut {
    i64 n, block, splits;
    __device__ i64 whole() const { return n / block; }
    __device__ i64 rest() const { return n % block; }
    __device__ i64 blocks() const { return whole() + (rest() > 0); }
};

// Write the elements from `first` on, `n` of them and in `row`, to where a Blosc block of `count` elements has them.
__device__ inline void scatter_bytes(const u8 *row, u32 count, u32 first, u32 n, u32 typesize, u8 *block) {
    for (u32 b = 0; b < typesize; ++b)
        for (u32 e = threadIdx.x; e < n; e += blockDim.x)
            block[static_cast<u64>(b) * count + first + e] = row[e * typesize + b];
}

__device__ inline void scatter_bits(const u8 *row, u32 count, u32 first, u32 n, u32 typesize, u8 *block) {
    const u64 plane = count / 8;  // bytes of one bit of all elements
    for (u32 b = 0; b < typesize; ++b)
        for (u32 e = 8 * threadIdx.x; e < n; e += 8 * blockDim.x) {
            u64 values = 0;
#pragma unroll
            for (u32 k = 0; k < 8; ++k) values |= static_cast<u64>(row[(e + k) * typesize + b]) << (8 * k);
            const u64 rows = transposed(values);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) block[(8 * b + i) * plane + (first + e) / 8] = static_cast<u8>(rows >> (8 * i));
        }
}

// All blocks of all chunks → their order of bytes or bits; blocks that are not sorted are copied. `mode`: as the flag.
extern "C" __global__ void __launch_bounds__(256)
    shuffle(const u8 *__restrict__ chunks, i64 n, i64 count, i64 block, i64 typesize, i64 mode, u8 *__restrict__ whole,
            u8 *__restrict__ rests) {
    __shared__ __align__(16) u8 row[ELEMENTS * MOST_BYTES];
    const Cut cut{n, block, 1};
    const u32 width = static_cast<u32>(typesize);
    const u32 step = width <= MOST_BYTES ? ELEMENTS : ELEMENTS * MOST_BYTES / width & ~7u;  // elements of a tile
    const i64 tiles = (block + step * width - 1) / (step * width),
              rest_tiles = (cut.rest() + step * width - 1) / (step * width);
    const i64 each = cut.whole() * tiles + rest_tiles;
    for (i64 task = blockIdx.x; task < count * each; task += gridDim.x) {
        const i64 chunk = task / each, tile = task % each;
        const bool is_rest = tile >= cut.whole() * tiles;
        const i64 number = is_rest ? cut.whole() : tile / tiles;
        const u32 first = static_cast<u32>(tile - number * tiles) * step, begin = first * width;
        const u32 size = static_cast<u32>(is_rest ? cut.rest() : block), elements = size / width;
        const u32 nbytes = size - begin < step * width ? size - begin : step * width;
        const u8 *from = chunks + chunk * n + number * block;
        u8 *to = is_rest ? rests + chunk * cut.rest() : whole + (chunk * cut.whole() + number) * block;
        if (mode == 0 || (mode == BIT_SHUFFLE && elements % 8)) {
            copy_bytes(to + begin, from + begin, nbytes, threadIdx.x, blockDim.x);
            continue;
        }
        const u32 here = elements - first < step ? elements - first : step;
        copy_bytes(row, from + begin, here * width, threadIdx.x, blockDim.x);
        // Bytes behind the last whole element.
        for (u32 i = here * width + threadIdx.x; i < nbytes; i += blockDim.x) to[begin + i] = from[begin + i];
        sync_block();
        if (mode == BYTE_SHUFFLE) scatter_bytes(row, elements, first, here, width, to);
        else scatter_bits(row, elements, first, here, width, to);
        sync_block();
    }
}

// Bytes of a stream with its size before it; one that is not shorter is stored as it is.
__device__ inline u32 stored_nbytes(const Encoded &streams, i64 number, u32 decoded) {
    const u32 size = streams.size(number);
    return 4 + (size < decoded ? size : decoded);
}

// The sizes of all frames, and where in them their blocks begin. A frame that is not shorter than its chunk has a
// header and the chunk.
extern "C" __global__ void __launch_bounds__(LANES)
    blosc_sizes(i64 n, i64 count, i64 block, i64 splits, const u8 *whole, const i64 *whole_offsets, i64 whole_stride,
                const u32 *whole_sizes, const u8 *rests, const i64 *rest_offsets, i64 rest_stride,
                const u32 *rest_sizes, u32 *__restrict__ starts, u32 *__restrict__ sizes) {
    const Cut cut{n, block, splits};
    const Encoded streams{whole, whole_offsets, whole_stride, whole_sizes};
    const Encoded rest_streams{rests, rest_offsets, rest_stride, rest_sizes};
    for (i64 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        u64 begin = BLOSC_HEAD + 4 * cut.blocks();
        for (i64 first = 0; first < cut.blocks(); first += LANES) {
            const i64 number = first + lane_id();
            u32 nbytes = 0;
            if (number < cut.whole()) {
                const i64 stream = (chunk * cut.whole() + number) * splits;
                for (i64 k = 0; k < splits; ++k)
                    nbytes += stored_nbytes(streams, stream + k, static_cast<u32>(block / splits));
            } else if (number < cut.blocks()) {
                nbytes = stored_nbytes(rest_streams, chunk, static_cast<u32>(cut.rest()));
            }
            const u32 sum = running_sum(nbytes);
            if (number < cut.blocks()) starts[chunk * cut.blocks() + number] = static_cast<u32>(begin + sum - nbytes);
            begin += from_lane(sum, LANES - 1);
        }
        if (lane_id() == 0) sizes[chunk] = static_cast<u32>(begin < n + BLOSC_HEAD ? begin : n + BLOSC_HEAD);
    }
}

// By one thread. `flags` without MEMCPYED.
__device__ inline void put_header(u8 *frame, u32 flags, u32 typesize, const Cut &cut, u32 size) {
    frame[0] = 2;  // versions of the frame and of the streams
    frame[1] = 1;
    frame[2] = static_cast<u8>(flags | (size == cut.n + BLOSC_HEAD ? MEMCPYED : 0));
    frame[3] = static_cast<u8>(typesize);
    store32(frame + 4, static_cast<u32>(cut.n));
    store32(frame + 8, static_cast<u32>(cut.block));
    store32(frame + 12, size);
}

// Write the frames: a block of threads for each of their blocks.
extern "C" __global__ void __launch_bounds__(256)
    blosc_write(const u8 *__restrict__ chunks, i64 n, i64 count, i64 block, i64 splits, i64 typesize, i64 flags,
                const u8 *__restrict__ whole_bytes, const u8 *__restrict__ rest_bytes, const u8 *whole,
                const i64 *whole_offsets, i64 whole_stride, const u32 *whole_sizes, const u8 *rests,
                const i64 *rest_offsets, i64 rest_stride, const u32 *rest_sizes, const u32 *__restrict__ starts,
                const i64 *__restrict__ offsets, u8 *__restrict__ arena) {
    const Cut cut{n, block, splits};
    const Encoded streams{whole, whole_offsets, whole_stride, whole_sizes};
    const Encoded rest_streams{rests, rest_offsets, rest_stride, rest_sizes};
    const i64 each = cut.blocks() ? cut.blocks() : 1;  // chunks without bytes have a header
    for (i64 task = blockIdx.x; task < count * each; task += gridDim.x) {
        const i64 chunk = task / each, number = task % each;
        const bool is_rest = number == cut.whole();
        u8 *frame = arena + offsets[chunk];
        const u32 size = static_cast<u32>(offsets[chunk + 1] - offsets[chunk]);
        if (number == 0 && threadIdx.x == 0)
            put_header(frame, static_cast<u32>(flags), static_cast<u32>(typesize), cut, size);
        if (size == n + BLOSC_HEAD) {
            const u64 at = number * block, nbytes = is_rest ? cut.rest() : block;
            copy_bytes(frame + BLOSC_HEAD + at, chunks + chunk * n + at, nbytes, threadIdx.x, blockDim.x);
            continue;
        }
        const u32 start = starts[task];
        if (threadIdx.x == 0) store32(frame + BLOSC_HEAD + 4 * number, start);
        const Encoded &encoded = is_rest ? rest_streams : streams;
        const u32 part = static_cast<u32>(is_rest ? cut.rest() : block / splits);
        const i64 first = is_rest ? chunk : (chunk * cut.whole() + number) * splits;
        u8 *to = frame + start;
        for (i64 stream = first; stream < first + (is_rest ? 1 : splits); ++stream) {
            const u32 nbytes = encoded.size(stream);
            const bool is_shorter = nbytes < part;
            const u32 stored = is_shorter ? nbytes : part;
            const u8 *from = is_shorter ? encoded.stream(stream) : (is_rest ? rest_bytes : whole_bytes) + stream * part;
            if (threadIdx.x == 0) store32(to, stored);
            copy_bytes(to + 4, from, stored, threadIdx.x, blockDim.x);
            to += 4 + stored;
        }
    }
}
