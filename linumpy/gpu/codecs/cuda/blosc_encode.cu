// Chunks → Blosc 1 frames around streams that another kernel encodes. Format: README_CHUNK_FORMAT.rst of the C-Blosc
// project; blosc.cu decodes the same frames.
//
// `shuffle` shuffles the bytes or bits of each block of a chunk. It writes the whole blocks of all chunks without gaps
// to one buffer, and the rests, the shorter last blocks of all chunks, to another. Other kernels encode the streams in
// both. `blosc_sizes` decides which streams are stored uncompressed, and sums the sizes; `blosc_write` writes the
// frames.
//
// The flag NOT_SPLIT tells readers whether blocks are split; C-Blosc before 1.11 infers it from the sizes. Therefore an
// LZ4 block is split exactly if C-Blosc before 1.11 expects it, and the flag is set otherwise. C-Blosc 1.x shuffles
// bits only in blocks with a multiple of 8 elements; other blocks are not shuffled.

#include "blosc.cuh"
#include "encode.cuh"

// Encoded streams: packed, with `offsets`; or in slots, with `stride` and `sizes`; or none, if all are stored
// uncompressed.
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

// How chunks of `n` bytes are cut: `whole` blocks of `block` bytes, each split into `splits` streams, and if `rest` > 0
// a block of `rest` bytes.
struct Cut {
    i64 n, block, splits;
    __device__ i64 whole() const { return n / block; }
    __device__ i64 rest() const { return n % block; }
    __device__ i64 blocks() const { return whole() + (rest() > 0); }
};

// Maximum bytes of a tile, which a block of threads shuffles in shared memory.
constexpr u32 TILE = 16384;

// Where a tile goes: `n` elements of `width` bytes, from element `first` on, of a block of `count` elements.
struct Tile {
    u8 *block;
    u32 count, first, n, width;
    // Whether runs of `elements` elements begin at aligned words of the result.
    __device__ bool in_words(u32 elements) const { return count % elements == 0 && (address_of(block) & 3) == 0; }
};

// Write the shuffled bytes of a tile, whose elements are in `row`.
__device__ inline void scatter_bytes(const u8 *row, const Tile &tile) {
    const u32 width = tile.width, each = tile.in_words(4) ? 4 : 1;
    for (u32 item = threadIdx.x; item < width * (tile.n / each); item += blockDim.x) {
        const u32 b = item / (tile.n / each), e = each * (item % (tile.n / each));
        u8 *to = tile.block + static_cast<u64>(b) * tile.count + tile.first + e;
        u32 values = row[e * width + b];
        if (each == 1) {
            *to = static_cast<u8>(values);
            continue;
        }
#pragma unroll
        for (u32 k = 1; k < 4; ++k) values |= static_cast<u32>(row[(e + k) * width + b]) << (8 * k);
        *reinterpret_cast<u32 *>(to) = values;
    }
}

// Byte b of the eight elements from `e` on. WIDTH: bytes of an element, up to 8; 0: any `width`.
template <u32 WIDTH> __device__ inline u64 byte_of_eight(const u8 *row, u32 e, u32 b, u32 width) {
    u64 values = 0;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) {
        if (WIDTH == 0) {
            values |= static_cast<u64>(row[(e + k) * width + b]) << (8 * k);
        } else {
            const u64 word = reinterpret_cast<const u64 *>(row + e * WIDTH)[k * WIDTH / 8];
            values |= (word >> (8 * (k * WIDTH % 8) + 8 * b) & 0xff) << (8 * k);
        }
    }
    return values;
}

// Write the shuffled bits of a tile, whose elements are in `row`. A thread takes byte b of 32 elements, and writes four
// bytes of each of the eight bits.
template <u32 WIDTH> __device__ inline void scatter_bits(const u8 *row, const Tile &tile) {
    const u32 width = tile.width, groups = tile.in_words(32) ? 4 : 1;
    const u64 plane = tile.count / 8;  // bytes of one bit of all elements
    for (u32 item = threadIdx.x; item < width * (tile.n / 8 / groups); item += blockDim.x) {
        const u32 b = item % width, e = 8 * groups * (item / width);
        u8 *to = tile.block + 8 * b * plane + (tile.first + e) / 8;
        u32 rows[8] = {};
        for (u32 group = 0; group < groups; ++group) {
            const u64 bits = transposed(byte_of_eight<WIDTH>(row, e + 8 * group, b, width));
#pragma unroll
            for (u32 i = 0; i < 8; ++i) rows[i] |= static_cast<u32>(bits >> (8 * i) & 0xff) << (8 * group);
        }
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (groups == 1) to[i * plane] = static_cast<u8>(rows[i]);
            else *reinterpret_cast<u32 *>(to + i * plane) = rows[i];
        }
    }
}

// Shuffle all blocks of all chunks. `mode`: the header's flag of the shuffle; blocks are copied if it is 0.
extern "C" __global__ void __launch_bounds__(256)
    shuffle(const u8 *__restrict__ chunks, i64 n, i64 count, i64 block, i64 typesize, i64 mode, u8 *__restrict__ whole,
            u8 *__restrict__ rests) {
    __shared__ __align__(16) u8 row[TILE];
    const Cut cut{n, block, 1};
    const u32 width = static_cast<u32>(typesize);
    const u32 step = TILE / width & ~31u;  // elements of a tile
    const i64 tiles = (block + step * width - 1) / (step * width);
    const i64 rest_tiles = (cut.rest() + step * width - 1) / (step * width);
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
        const u32 in_tile = elements - first < step ? elements - first : step;
        copy_bytes(row, from + begin, in_tile * width, threadIdx.x, blockDim.x);
        // Bytes after the last whole element.
        for (u32 i = in_tile * width + threadIdx.x; i < nbytes; i += blockDim.x) to[begin + i] = from[begin + i];
        sync_block();
        const Tile of_block{to, elements, first, in_tile, width};
        if (mode == BYTE_SHUFFLE) scatter_bytes(row, of_block);
        else if (width == 1) scatter_bits<1>(row, of_block);
        else if (width == 2) scatter_bits<2>(row, of_block);
        else if (width == 4) scatter_bits<4>(row, of_block);
        else if (width == 8) scatter_bits<8>(row, of_block);
        else scatter_bits<0>(row, of_block);
        sync_block();
    }
}

// Bytes of a stream in a frame: 4 bytes that give the size, then the encoded bytes or, if these are not fewer, the
// uncompressed bytes.
__device__ inline u32 stored_nbytes(const Encoded &streams, i64 number, u32 decoded) {
    const u32 size = streams.size(number);
    return 4 + (size < decoded ? size : decoded);
}

// Compute the sizes of all frames, and the offsets of their blocks. If a frame is not shorter than its chunk, it
// consists of a header and the chunk.
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

// Write the header of a frame of `size` bytes. By one thread. `flags`: without MEMCPYED.
__device__ inline void put_header(u8 *frame, u32 flags, u32 typesize, const Cut &cut, u32 size) {
    frame[0] = 2;  // versions of the frame and of the streams
    frame[1] = 1;
    frame[2] = static_cast<u8>(flags | (size == cut.n + BLOSC_HEAD ? MEMCPYED : 0));
    frame[3] = static_cast<u8>(typesize);
    store32(frame + 4, static_cast<u32>(cut.n));
    store32(frame + 8, static_cast<u32>(cut.block));
    store32(frame + 12, size);
}

// Write the frames: one block of threads for each Blosc block.
extern "C" __global__ void __launch_bounds__(256)
    blosc_write(const u8 *__restrict__ chunks, i64 n, i64 count, i64 block, i64 splits, i64 typesize, i64 flags,
                const u8 *__restrict__ whole_bytes, const u8 *__restrict__ rest_bytes, const u8 *whole,
                const i64 *whole_offsets, i64 whole_stride, const u32 *whole_sizes, const u8 *rests,
                const i64 *rest_offsets, i64 rest_stride, const u32 *rest_sizes, const u32 *__restrict__ starts,
                const i64 *__restrict__ offsets, u8 *__restrict__ arena) {
    const Cut cut{n, block, splits};
    const Encoded streams{whole, whole_offsets, whole_stride, whole_sizes};
    const Encoded rest_streams{rests, rest_offsets, rest_stride, rest_sizes};
    const i64 each = cut.blocks() ? cut.blocks() : 1;  // empty chunks have a header
    for (i64 task = blockIdx.x; task < count * each; task += gridDim.x) {
        const i64 chunk = task / each, number = task % each;
        const bool is_rest = number == cut.whole();
        u8 *frame = arena + offsets[chunk];
        const u32 size = static_cast<u32>(offsets[chunk + 1] - offsets[chunk]);
        if (number == 0 && threadIdx.x == 0)
            put_header(frame, static_cast<u32>(flags), static_cast<u32>(typesize), cut, size);
        if (size == n + BLOSC_HEAD) {
            const u64 offset = number * block, nbytes = is_rest ? cut.rest() : block;
            copy_bytes(frame + BLOSC_HEAD + offset, chunks + chunk * n + offset, nbytes, threadIdx.x, blockDim.x);
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
