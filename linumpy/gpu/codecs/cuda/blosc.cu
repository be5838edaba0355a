// Blosc 1 frames → streams, and decoded streams → unshuffled bytes. Format: README_CHUNK_FORMAT.rst of the C-Blosc
// project.
//
// A frame has a header of 16 bytes, the offset of each block in 4 bytes, and the blocks. A block is one stream or, if
// split, one stream for each byte of an element; 4 bytes before a stream give the size of the stream. `blosc_frames`,
// one warp for each chunk, lists all streams; `stored` copies streams that are stored uncompressed; `unshuffle` undoes
// the shuffle of bytes or bits, block by block. numcodecs' shuffle filter, too, is undone by `unshuffle`.

#include "blosc.cuh"

constexpr u32 MAX_SPLITS = 16, MIN_SPLIT_NBYTES = 128, LAST_FORMAT = 4;

// How the bytes of one chunk are brought into their final order.
struct Order {
    i64 source, target;  // offsets in the buffers of decoded streams and of chunks
    i64 nbytes;  // size of the chunk
    u32 block_nbytes, typesize;
    int mode, chunk;  // mode: 0, BYTE_SHUFFLE or BIT_SHUFFLE
};

struct BloscHead {
    u32 nbytes, block_nbytes, stored, typesize, flags;  // stored: size of the frame
    u32 blocks, splits;  // blocks 0: the frame holds the chunk uncompressed. A shorter last block is never split
    int codec;
};

__device__ inline int parse_blosc(const u8 *p, i64 nbytes, i64 expected, i64 codec, BloscHead &head) {
    if (nbytes < BLOSC_HEAD) return TRUNCATED;
    if (p[0] != 2 || p[1] != 1) return BAD_HEADER;  // versions of the frame and of the streams
    head.flags = p[2];
    head.typesize = p[3];
    head.nbytes = load32(p + 4);
    head.block_nbytes = load32(p + 8);
    head.stored = load32(p + 12);
    if (head.stored > nbytes) return TRUNCATED;
    if (head.stored < nbytes) return BAD_HEADER;
    if (head.nbytes != static_cast<u64>(expected)) return WRONG_SIZE;
    if (head.typesize == 0 || head.block_nbytes == 0 || head.block_nbytes > head.nbytes) return BAD_HEADER;
    if (head.flags & RESERVED) return UNSUPPORTED;
    if (head.flags & MEMCPYED) {
        if (head.flags >> 5 > LAST_FORMAT) return BAD_HEADER;
        head.blocks = 0;
        return head.stored == head.nbytes + static_cast<u64>(BLOSC_HEAD) ? FINE : BAD_HEADER;
    }
    const u32 format = head.flags >> 5;
    head.codec = format == 1 ? LZ4 : format == 3 ? ZLIB : format == 4 ? ZSTD : NOTHING;
    if (head.codec != codec) return UNSUPPORTED;  // frames may differ from the metadata, but only one decoder runs
    head.blocks = (head.nbytes - 1) / head.block_nbytes + 1;
    if (BLOSC_HEAD + 4ull * head.blocks > head.stored) return TRUNCATED;
    const bool split = !(head.flags & NOT_SPLIT) && head.typesize <= MAX_SPLITS &&
                       head.block_nbytes / head.typesize >= MIN_SPLIT_NBYTES;
    head.splits = split ? head.typesize : 1;
    return FINE;
}

// List the streams of one block of a frame, from `to` on. By one lane.
__device__ inline int list_block(const u8 *p, const BloscHead &head, u32 number, const Stream &chunk, Stream *to) {
    const bool shorter = number == head.blocks - 1 && head.nbytes % head.block_nbytes;
    const u32 size = shorter ? head.nbytes % head.block_nbytes : head.block_nbytes;
    const u32 splits = shorter ? 1 : head.splits, part = size / splits;
    u64 offset = load32(p + BLOSC_HEAD + 4 * number);
    if (offset < BLOSC_HEAD + 4ull * head.blocks) return BAD_DATA;
    if (part * splits != size) return BAD_HEADER;
    for (u32 k = 0; k < splits; ++k) {
        if (offset + 4 > head.stored) return TRUNCATED;
        const u32 stored = load32(p + offset);
        offset += 4;
        if (stored == 0 || stored > head.stored - offset) return TRUNCATED;
        const i64 target = chunk.target + static_cast<i64>(number) * head.block_nbytes + static_cast<i64>(k) * part;
        to[k] = Stream{chunk.source + static_cast<i64>(offset), stored, target, part, chunk.chunk,
                       stored == part ? STORED : head.codec};
        offset += stored;
    }
    return FINE;
}

extern "C" __global__ void __launch_bounds__(LANES)
    blosc_frames(const u8 *__restrict__ arena, const Stream *__restrict__ chunks, i64 count,
                 const i64 *__restrict__ offsets, i64 codec, Stream *streams, i64 capacity, u64 *counters,
                 Order *orders, int *status) {
    for (i64 number = blockIdx.x; number < count; number += gridDim.x) {
        const Stream chunk = chunks[number];
        const u8 *p = arena + chunk.source;
        BloscHead head{};
        int state = parse_blosc(p, chunk.source_nbytes, chunk.target_nbytes, codec, head);
        const bool whole = state == FINE && head.blocks == 0;
        u32 stream_count = 0;
        if (state == FINE) {
            const bool shorter = !whole && head.nbytes % head.block_nbytes;
            stream_count = whole ? 1 : (head.blocks - shorter) * head.splits + shorter;
        }
        u64 first = 0;
        if (lane_id() == 0) first = atomicAdd(counters, static_cast<u64>(stream_count));
        first = from_lane(first, 0);
        if (first + stream_count > static_cast<u64>(capacity)) {
            for (u64 k = first + lane_id(); k < static_cast<u64>(capacity); k += LANES) streams[k].codec = NOTHING;
            state = NO_SPACE;
        } else if (state == FINE && whole) {
            if (lane_id() == 0)
                streams[first] =
                    Stream{chunk.source + BLOSC_HEAD, head.nbytes, chunk.target, head.nbytes, chunk.chunk, STORED};
        } else if (state == FINE) {
            for (u32 b = lane_id(); b < head.blocks; b += LANES) {
                Stream *to = streams + first + static_cast<u64>(b) * head.splits;
                const int block_state = list_block(p, head, b, chunk, to);
                if (block_state == FINE) continue;
                state = block_state;
                const bool shorter = b == head.blocks - 1 && head.nbytes % head.block_nbytes;
                for (u32 k = 0; k < (shorter ? 1 : head.splits); ++k) to[k].codec = NOTHING;
            }
        }
        if (state != FINE) fail(status, chunk.chunk, state);
        if (lane_id() == 0) {
            const int sorted = head.flags & BYTE_SHUFFLE && head.typesize > 1 ? BYTE_SHUFFLE : head.flags & BIT_SHUFFLE;
            const int mode = whole ? 0 : sorted;
            orders[number] = Order{chunk.target, offsets[number], chunk.target_nbytes, head.block_nbytes, head.typesize,
                                   mode,         chunk.chunk};
        }
    }
}

// Copy streams that are stored uncompressed.
extern "C" __global__ void stored(const u8 *__restrict__ arena, u8 *target, const Stream *__restrict__ streams,
                                  const i64 *__restrict__ count, i64 capacity, int *status) {
    const i64 n = *count < capacity ? *count : capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != STORED) continue;
        if (stream.source_nbytes != stream.target_nbytes) {
            if (threadIdx.x == 0) fail(status, stream.chunk, WRONG_SIZE);
            continue;
        }
        const u8 *from = arena + stream.source;
        u8 *to = target + stream.target;
        const u32 skew = static_cast<u32>(reinterpret_cast<u64>(from) & 3);
        const i64 head = (16 - (reinterpret_cast<u64>(to) & 15)) & 15;
        const i64 begin = head < stream.target_nbytes ? head : stream.target_nbytes;
        const i64 end = begin + ((stream.target_nbytes - begin) & ~15ll);
        for (i64 i = threadIdx.x; i < begin; i += blockDim.x) to[i] = from[i];
        for (i64 i = begin + 16 * static_cast<i64>(threadIdx.x); i < end; i += 16 * static_cast<i64>(blockDim.x)) {
            // Words of the source, shifted to the alignment of the target. The last word that is read may lie after the
            // stream, but not after the arena.
            const u32 *word = reinterpret_cast<const u32 *>(from + i - ((skew + i) & 3));
            const u32 shift = 8 * ((skew + static_cast<u32>(i)) & 3);
            u32 w[5];
#pragma unroll
            for (int k = 0; k < 5; ++k) w[k] = k < 4 || shift ? word[k] : 0;
            uint4 v;
            v.x = funnel(w[0], w[1], shift);
            v.y = funnel(w[1], w[2], shift);
            v.z = funnel(w[2], w[3], shift);
            v.w = funnel(w[3], w[4], shift);
            *reinterpret_cast<uint4 *>(to + i) = v;
        }
        for (i64 i = end + threadIdx.x; i < stream.target_nbytes; i += blockDim.x) to[i] = from[i];
    }
}

// Elements of a tile, which a block of threads reorders in shared memory. Tiles of elements of more than
// MAX_ELEMENT_NBYTES have fewer elements.
constexpr u32 ELEMENTS = 1024, MAX_ELEMENT_NBYTES = 16;

// Fill `row` with `n` elements, from element `first` on, of a block of `count` elements with shuffled bytes.
__device__ inline void gather_bytes(const u8 *block, u32 count, u32 first, u32 n, u32 typesize, u8 *row) {
    for (u32 b = 0; b < typesize; ++b)
        for (u32 e = threadIdx.x; e < n; e += blockDim.x)
            row[e * typesize + b] = block[static_cast<u64>(b) * count + first + e];
}

// As `gather_bytes`, for a block with shuffled bits.
__device__ inline void gather_bits(const u8 *block, u32 count, u32 first, u32 n, u32 typesize, u8 *row) {
    const u32 plane = count / 8;  // bytes of one bit of all elements
    for (u32 b = 0; b < typesize; ++b)
        for (u32 e = 8 * threadIdx.x; e < n; e += 8 * blockDim.x) {
            u64 rows = 0;
#pragma unroll
            for (u32 i = 0; i < 8; ++i)
                rows |= static_cast<u64>(block[static_cast<u64>(8 * b + i) * plane + (first + e) / 8]) << (8 * i);
            const u64 values = transposed(rows);
#pragma unroll
            for (u32 k = 0; k < 8; ++k) row[(e + k) * typesize + b] = static_cast<u8>(values >> (8 * k));
        }
}

// blockIdx.x iterates over the tiles of a chunk, blockIdx.y over the chunks.
extern "C" __global__ void __launch_bounds__(256)
    unshuffle(const u8 *__restrict__ source, u8 *__restrict__ target, const Order *__restrict__ orders,
              const int *__restrict__ status) {
    __shared__ __align__(16) u8 row[ELEMENTS * MAX_ELEMENT_NBYTES];
    const Order order = orders[blockIdx.y];
    if (status[order.chunk] != FINE) return;
    const u8 *from = source + order.source;
    u8 *to = target + order.target;
    const bool sorted = order.mode != 0;
    const u32 typesize = sorted ? order.typesize : 1;
    // A chunk that is not shuffled is copied as one block.
    const i64 block_nbytes = sorted ? order.block_nbytes : order.nbytes;
    const u32 step = typesize <= MAX_ELEMENT_NBYTES ? ELEMENTS : ELEMENTS * MAX_ELEMENT_NBYTES / typesize & ~7u;
    const i64 tiles = (block_nbytes / typesize + step - 1) / step + 1;  // the last tile: bytes after the whole elements
    const i64 blocks = (order.nbytes + block_nbytes - 1) / block_nbytes;
    for (i64 tile = blockIdx.x; tile < tiles * blocks; tile += gridDim.x) {
        const i64 begin = tile / tiles * block_nbytes;
        const u32 size = static_cast<u32>(order.nbytes - begin < block_nbytes ? order.nbytes - begin : block_nbytes);
        const u32 count = size / typesize;
        // Bits are shuffled only if the number of elements is a multiple of eight.
        const bool unsorted = !sorted || (order.mode == BIT_SHUFFLE && count % 8);
        u32 first = static_cast<u32>(tile % tiles) * step, last = first + step;
        if (tile % tiles == tiles - 1) {
            for (u32 i = count * typesize + threadIdx.x; i < size; i += blockDim.x) to[begin + i] = from[begin + i];
            continue;
        }
        if (first >= count) continue;
        if (last > count) last = count;
        const u64 nbytes = static_cast<u64>(last - first) * typesize,
                  offset = begin + static_cast<u64>(first) * typesize;
        if (unsorted) {
            for (u64 i = threadIdx.x; i < nbytes; i += blockDim.x) to[offset + i] = from[offset + i];
            continue;
        }
        if (order.mode == BYTE_SHUFFLE) gather_bytes(from + begin, count, first, last - first, typesize, row);
        else gather_bits(from + begin, count, first, last - first, typesize, row);
        sync_block();
        const u64 words = (offset & 15) == 0 && (reinterpret_cast<u64>(to) & 15) == 0 ? nbytes & ~15ull : 0;
        for (u64 i = 16 * threadIdx.x; i < words; i += 16 * blockDim.x)
            *reinterpret_cast<uint4 *>(to + offset + i) = *reinterpret_cast<const uint4 *>(row + i);
        for (u64 i = words + threadIdx.x; i < nbytes; i += blockDim.x) to[offset + i] = row[i];
        sync_block();
    }
}
